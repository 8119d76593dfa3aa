"""The input of a response as messages of a chat: calls, their outputs and reasoning are items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from gateway.refusals import unimplemented
from gateway.responses.compaction import COMPACTIONS, summary_of
from gateway.responses.namespaces import flat_name
from gateway.responses.schema import InputItem
from gateway.schema import CalledFunction, ChatMessage, ContentPart, ToolCall
from shared.errors import InvalidArgument

Role = Literal["system", "developer", "user", "assistant"]

_ROLES = frozenset({"system", "developer", "user", "assistant"})
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


def chat_messages(given: Sequence[tuple[str, InputItem]]) -> list[ChatMessage]:
    """Args:
        given: items, each with the field it came in.

    Raises:
        InvalidArgument: there is nothing, or an item of a kind that is not implemented.
    """
    if not given:
        raise InvalidArgument.of("PROMPT_EMPTY", "input", "input is missing or empty")
    messages: list[ChatMessage] = []
    thought: str | None = None
    for field, item in given:
        if item.type == "reasoning":
            thought = _thought(item)
        elif item.type == "function_call":
            _add_call(field, item, messages, thought)
            thought = None
        elif item.type == "function_call_output":
            messages.append(_output(field, item))
        elif item.type in COMPACTIONS:
            messages.append(ChatMessage(role="assistant", content=summary_of(field, item)))
        else:
            message = _message(field, item)
            if message.role == "assistant":
                message.reasoning_content, thought = thought, None
            messages.append(message)
    return messages


def _add_call(
    field: str, item: InputItem, messages: list[ChatMessage], thought: str | None
) -> None:
    """Adds a call to the assistant's last message, or to a new one."""
    name = flat_name(_given(f"{field}.name", item.name), item.namespace)
    function = CalledFunction(name=name, arguments=item.arguments or "{}")
    call = ToolCall(id=item.call_id, function=function)
    if messages and messages[-1].role == "assistant" and thought is None:
        messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
        return
    messages.append(ChatMessage(role="assistant", tool_calls=[call], reasoning_content=thought))


def _output(field: str, item: InputItem) -> ChatMessage:
    call_id = _given(f"{field}.call_id", item.call_id)
    output = item.output or ""
    if isinstance(output, list):
        output = [_part(f"{field}.output[{n}]", part) for n, part in enumerate(output)]
    return ChatMessage(role="tool", tool_call_id=call_id, content=output)


def _thought(item: InputItem) -> str | None:
    """Returns the text of a reasoning item; one that is encrypted or a summary has none."""
    content = item.content if isinstance(item.content, list) else []
    return "".join(part.text or "" for part in content if part.type == "reasoning_text") or None


def _message(field: str, item: InputItem) -> ChatMessage:
    if item.type != "message":
        raise unimplemented(f"{field}.type", f"an item of type {item.type[:64]!r}")
    if item.role not in _ROLES:
        message = f"{field}.role is {item.role!r}; it must be one of {', '.join(sorted(_ROLES))}"
        raise InvalidArgument.of("FIELD_INVALID", f"{field}.role", message)
    content = item.content
    if isinstance(content, list):
        content = [_part(f"{field}.content[{n}]", part) for n, part in enumerate(content)]
    return ChatMessage(role=cast("Role", item.role), content=content)


def _part(field: str, part: ContentPart) -> ContentPart:
    if part.type not in _TEXT_PARTS:
        raise unimplemented(f"{field}.type", f"content of type {part.type[:64]!r}")
    return ContentPart(type="text", text=part.text)


def _given(field: str, value: str | None) -> str:
    if value is None:
        raise InvalidArgument.of("FIELD_INVALID", field, f"{field} is missing")
    return value
