"""Anthropic's turns as messages of a chat: calls, their results and thinking are blocks there."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.messages.schema import Block, Message
from gateway.refusals import unimplemented
from gateway.schema import CalledFunction, ChatMessage, ContentPart, ToolCall
from shared.errors import InvalidArgument


def chat_messages(turns: Sequence[Message]) -> list[ChatMessage]:
    """Raises:
    InvalidArgument: a block is of a kind that is not implemented, or lacks a field.
    """
    messages: list[ChatMessage] = []
    for index, turn in enumerate(turns):
        if isinstance(turn.content, str):
            messages.append(ChatMessage(role=turn.role, content=turn.content))
        elif turn.role == "assistant":
            messages.append(_assistant(f"messages[{index}]", turn.content))
        else:
            messages += _others(f"messages[{index}]", turn)
    return messages


def _assistant(field: str, blocks: Sequence[Block]) -> ChatMessage:
    texts: list[ContentPart] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        place = f"{field}.content[{number}]"
        if block.type == "text":
            texts.append(ContentPart(type="text", text=block.text))
        elif block.type == "tool_use":
            name = _given(f"{place}.name", block.name)
            function = CalledFunction(name=name, arguments=block.input or {})
            calls.append(ToolCall(id=block.id, function=function))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            raise unimplemented(f"{place}.type", f"content of type {block.type[:64]!r}")
    return ChatMessage(
        role="assistant",
        content=texts,
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _others(field: str, turn: Message) -> list[ChatMessage]:
    """Returns the results of tools, each a message of its own, then the text."""
    results: list[ChatMessage] = []
    texts: list[ContentPart] = []
    for number, block in enumerate(turn.content):
        assert isinstance(block, Block)
        place = f"{field}.content[{number}]"
        if block.type == "text":
            texts.append(ContentPart(type="text", text=block.text))
        elif block.type == "tool_result":
            call_id = _given(f"{place}.tool_use_id", block.tool_use_id)
            content = _result(place, block)
            results.append(ChatMessage(role="tool", tool_call_id=call_id, content=content))
        else:
            raise unimplemented(f"{place}.type", f"content of type {block.type[:64]!r}")
    if texts or not results:
        return [*results, ChatMessage(role=turn.role, content=texts)]
    return results


def _result(field: str, block: Block) -> str | list[ContentPart]:
    content = block.content or ""
    for number, part in enumerate(content):
        if isinstance(part, ContentPart) and part.type != "text":
            place = f"{field}.content[{number}].type"
            raise unimplemented(place, f"content of type {part.type[:64]!r}")
    return content


def _given(field: str, value: str | None) -> str:
    if value is None:
        raise InvalidArgument.of("FIELD_INVALID", field, f"{field} is missing")
    return value
