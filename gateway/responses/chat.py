"""Plans requests to `/v1/responses` as chats: the history they continue, their input and tools."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from pydantic import TypeAdapter

from gateway.constraints import json_schema_format
from gateway.failures import client_names
from gateway.generation import TargetModel
from gateway.planner import Plan, Planner
from gateway.responses.schema import (
    AllowedFunctions,
    InputItem,
    NamedFunction,
    ResponsesRequest,
    Tool,
)
from gateway.responses.store import (
    CONVERSATION,
    Item,
    ResponseStore,
    StoredResponse,
    log_failure,
    stored_items,
)
from gateway.sampling import OutputLength
from gateway.schema import (
    AllowedToolChoice,
    AllowedTools,
    CalledFunction,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    KnownFields,
    NamedTool,
    ResponseFormat,
    ToolCall,
    ToolDefinition,
    leave_out_hosted,
    refuse_rounds,
    required,
    unimplemented,
    unread,
)
from shared.errors import InvalidArgument

_COMPACTION_TYPES = frozenset({"compaction", "compaction_summary"})
COMPACTION_PROMPT = (
    "Summarize the conversation so far for whoever continues it: the task, what has been done and "
    "found, decisions, names of files and values that are still needed, and what is left to do."
)
_SUMMARY_PREFIX = b"outrider:summary:"
_ITEMS = TypeAdapter(list[InputItem])
Role = Literal["system", "developer", "user", "assistant"]
_ROLES = frozenset({"system", "developer", "user", "assistant"})
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_LOGPROBS = "message.output_text.logprobs"
# All but log probabilities are accepted without effect: reasoning is not encrypted here, and there
# are neither hosted tools nor images.
_INCLUDABLE = frozenset(
    {_LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url"}
    | {"code_interpreter_call.outputs", "computer_call_output.output.image_url"}
    | {"file_search_call.results", "web_search_call.action.sources", "web_search_call.results"}
)
_HOSTED_TOOLS = frozenset(
    {"code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation"}
    | {"mcp", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"}
    | {"web_search_preview_2025_03_11"}
)
_FIELDS = KnownFields.of_generation(
    harmless=frozenset(
        {"client_metadata", "max_tool_calls", "prompt_cache_options", "prompt_cache_retention"}
        | {"image", "stream_options"}  # `image` says how images are scaled down; there are none
    ),
    unimplemented=frozenset({"context_management"}),
    neutral={"truncation": ("disabled",)},
    renamed={"max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens"}
    | {"messages": "input", "response_format": "text.format"},
)
_TEXT_FIELDS = KnownFields()
# Reasoning is returned whole, never summarized.
_REASONING_FIELDS = KnownFields(frozenset({"generate_summary", "summary"}))


def flat_name(name: str, namespace: str | None) -> str:
    """Returns the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def namespaces(tools: Sequence[Tool]) -> Mapping[str, tuple[str, str]]:
    """Returns the (namespace, name) of each tool that has a namespace, by the tool's flat name."""
    return {
        flat_name(tool.name, namespace.name): (namespace.name, tool.name)
        for namespace in tools
        if namespace.type == "namespace" and namespace.name is not None
        for tool in namespace.tools or ()
        if tool.name is not None
    }


def compacted(items: Sequence[InputItem], summary: str) -> list[Item]:
    """Returns the items that replace a history: the user's messages and a summary of the whole.

    The summary is encoded, not encrypted: it is the client's own text.
    """
    users = [item for item in items if item.type == "message" and item.role == "user"]
    content = base64.b64encode(_SUMMARY_PREFIX + summary.encode()).decode()
    item_id = f"cmp_{uuid.uuid4().hex}"
    return [
        *stored_items(users),
        {"id": item_id, "type": "compaction", "encrypted_content": content},
    ]


def summary_of(field: str, item: InputItem) -> str:
    """Returns the summary in a compaction item.

    Raises:
        InvalidArgument: the item was not made by `/v1/responses/compact` of this program.
    """
    try:
        content = base64.b64decode(item.encrypted_content or "", validate=True)
        if content.startswith(_SUMMARY_PREFIX):
            return content.removeprefix(_SUMMARY_PREFIX).decode()
    except (binascii.Error, ValueError):  # ValueError: the bytes are not UTF-8
        pass
    field = f"{field}.encrypted_content"
    message = f"{field} is not what /v1/responses/compact of this gateway returns"
    raise InvalidArgument.of("FIELD_INVALID", field, message)


@dataclass(frozen=True, slots=True)
class History:
    """The conversation that a response continues.

    Attributes:
        items: pairs of field and item, in order; the field is the one of the request that the
            item came in. The input of the request comes last.
        new_items: the input items of the request itself, as they are stored.
        is_stored: whether the response will be stored.
    """

    items: Sequence[tuple[str, InputItem]]
    new_items: Sequence[Item]
    is_stored: bool


async def history_of(body: ResponsesRequest, store: ResponseStore | None, owner: str) -> History:
    """Returns the conversation that a request continues, with the request's input at its end.

    Args:
        store: None when the gateway runs without a response store.
        owner: name of the client's API key.

    Raises:
        InvalidArgument: a field needs a store and there is none, or two fields exclude each other.
        NotFound: a response, conversation or item that the request names is not stored for `owner`.
    """
    if store is None:
        _refuse_without_store(body)
        return History(_named_items(body.input), (), False)
    _check_exclusive_fields(body)
    earlier = await _earlier_items(body, store, owner)
    new_items = [
        await _resolved(item, f"input[{index}]", store, owner) if item.is_reference else item
        for index, item in enumerate(_input_items(body.input))
    ]
    is_stored = body.store is not False
    return History([*earlier, *_named_items(new_items)], stored_items(new_items), is_stored)


async def _earlier_items(
    body: ResponsesRequest, store: ResponseStore, owner: str
) -> list[tuple[str, InputItem]]:
    if body.previous_response_id is not None:
        field, items = "previous_response_id", await store.turns(owner, body.previous_response_id)
    elif body.conversation_id is not None:
        field = "conversation"
        items = await store.entry_items(owner, body.conversation_id, CONVERSATION)
    else:
        return []
    return [(field, item) for item in _ITEMS.validate_python(items)]


async def _resolved(item: InputItem, field: str, store: ResponseStore, owner: str) -> InputItem:
    """Returns the stored item that an item refers to."""
    return InputItem.model_validate(await store.item(owner, required(f"{field}.id", item.id)))


def _check_exclusive_fields(body: ResponsesRequest) -> None:
    if body.previous_response_id is not None and body.conversation is not None:
        message = "conversation is set beside previous_response_id; only one may be"
        raise InvalidArgument.of("HISTORY_AMBIGUOUS", "conversation", message)
    if body.background and body.store is False:
        message = "background can only be used when `store` is true"
        raise InvalidArgument.of("STORE_OFF", "background", message)


def _refuse_without_store(body: ResponsesRequest) -> None:
    fields = {
        "previous_response_id": body.previous_response_id,
        "conversation": body.conversation,
        "background": body.background,
        "store": body.store,
    }
    for index, item in enumerate(_input_items(body.input)):
        fields[f"input[{index}]"] = item.is_reference
    for field, value in fields.items():
        if value:
            raise InvalidArgument.of("STORE_OFF", field, f"{field} needs --response-store")


def _input_items(value: str | list[InputItem] | None) -> list[InputItem]:
    if isinstance(value, str):
        return [InputItem(type="message", role="user", content=value)]
    return value or []


def _named_items(value: str | list[InputItem] | None) -> list[tuple[str, InputItem]]:
    return [(f"input[{index}]", item) for index, item in enumerate(_input_items(value))]


def chat_messages(items: Sequence[tuple[str, InputItem]]) -> list[ChatMessage]:
    """Returns the messages of a chat.

    Args:
        items: pairs of field and item; errors name the field.

    Raises:
        InvalidArgument: there are no items, or the type of one is not implemented.
    """
    if not items:
        raise InvalidArgument.of("PROMPT_EMPTY", "input", "input is missing or empty")
    messages: list[ChatMessage] = []
    reasoning: str | None = None
    for field, item in items:
        if item.type == "reasoning":
            reasoning = _reasoning_text(item)
        elif item.type == "function_call":
            _add_call(field, item, messages, reasoning)
            reasoning = None
        elif item.type == "function_call_output":
            messages.append(_call_output(field, item))
        elif item.type in _COMPACTION_TYPES:
            messages.append(ChatMessage(role="assistant", content=summary_of(field, item)))
        else:
            message = _message(field, item)
            if message.role == "assistant":
                message.reasoning_content, reasoning = reasoning, None
            messages.append(message)
    return messages


def _add_call(
    field: str, item: InputItem, messages: list[ChatMessage], reasoning: str | None
) -> None:
    """Adds a call to the last message, if it is the assistant's and no reasoning precedes
    the call; else to a new message."""
    name = flat_name(required(f"{field}.name", item.name), item.namespace)
    function = CalledFunction(name=name, arguments=item.arguments or "{}")
    call = ToolCall(id=item.call_id, function=function)
    if messages and messages[-1].role == "assistant" and reasoning is None:
        messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
        return
    messages.append(ChatMessage(role="assistant", tool_calls=[call], reasoning_content=reasoning))


def _call_output(field: str, item: InputItem) -> ChatMessage:
    call_id = required(f"{field}.call_id", item.call_id)
    output = item.output or ""
    if isinstance(output, list):
        output = [_part(f"{field}.output[{n}]", part) for n, part in enumerate(output)]
    return ChatMessage(role="tool", tool_call_id=call_id, content=output)


def _reasoning_text(item: InputItem) -> str | None:
    """Returns the text of a reasoning item; None if it is encrypted or only a summary."""
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
        raise unread(field, part.type)
    return ContentPart(type="text", text=part.text)


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A request to `/v1/responses`, planned as a chat.

    Attributes:
        body: the request's body, of which the response repeats many fields.
        item_id: the id of the first message in the output.
        namespaces: the namespace of a tool and its name there, by the tool's flat name.
    """

    chat: Plan
    body: ResponsesRequest
    history: History
    item_id: str
    namespaces: Mapping[str, tuple[str, str]]


async def response_plan(
    body: ResponsesRequest, history: History, planner: Planner, model: TargetModel
) -> ResponsePlan:
    """Plans a request.

    Raises:
        InvalidArgument: the request can never be served.
    """
    _FIELDS.refuse(body)
    refuse_rounds(body.speculation)
    instructions = []
    if body.instructions is not None:
        instructions = [ChatMessage(role="system", content=body.instructions)]
    chat = ChatCompletionRequest(
        messages=[*instructions, *chat_messages(history.items)],
        stream=body.stream,
        **body.shared_fields,
        verbosity=None if body.text is None else body.text.verbosity,
        logprobs=_wants_logprobs(body),
        top_logprobs=body.top_logprobs or None,
        reasoning_effort=_effort(body),
        response_format=_response_format(body),
        tools=_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        speculation=body.speculation,
    )
    with client_names({"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}):
        length = OutputLength(body.max_output_tokens, "max_output_tokens", is_capped=True)
        plan = await planner.chat(chat, model, length=length)
    plan = replace(plan, request_id=f"resp_{uuid.uuid4().hex}", grammar_field="text.format")
    item_id = f"msg_{uuid.uuid4().hex}"
    return ResponsePlan(plan, body, history, item_id, namespaces(body.tools or ()))


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    if body.text is None:
        return None
    _TEXT_FIELDS.refuse(body.text, "text.")
    text_format = body.text.format
    if text_format is None:
        return None
    if text_format.type in ("text", "json_object"):
        return ResponseFormat(type=text_format.type)
    if text_format.type != "json_schema":
        raise unimplemented("text.format.type", f"text.format of type {text_format.type[:64]!r}")
    schema: Any = text_format.content
    return json_schema_format(required("text.format.schema", schema))


def _tools(body: ResponsesRequest) -> list[ToolDefinition] | None:
    definitions = []
    for tool, namespace in _functions(body.tools or (), "tools"):
        function = FunctionDefinition(
            name=flat_name(tool.name or "", namespace),
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        definitions.append(ToolDefinition(type="function", function=function))
    return definitions


def _functions(
    tools: Sequence[Tool], field: str, namespace: str | None = None
) -> Iterator[tuple[Tool, str | None]]:
    """Yields each function among the tools with its namespace; None for one without."""
    for index, tool in enumerate(tools):
        tool_field = f"{field}[{index}]"
        is_namespace = tool.type == "namespace" and namespace is None
        if tool.type == "function" or is_namespace:
            required(f"{tool_field}.name", tool.name)
        if tool.type == "function":
            yield tool, namespace
        elif is_namespace:
            yield from _functions(tool.tools or (), f"{tool_field}.tools", tool.name)
        elif tool.type in _HOSTED_TOOLS:
            leave_out_hosted(tool_field, tool.type)
        else:
            raise unimplemented(f"{tool_field}.type", f"a tool of type {tool.type[:64]!r}")


def _tool_choice(
    choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None,
) -> Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None:
    if isinstance(choice, NamedFunction):
        return NamedTool.of(choice.name)
    if isinstance(choice, AllowedFunctions):
        tools = [NamedTool.of(tool.name) for tool in choice.tools]
        return AllowedToolChoice(
            type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools)
        )
    return choice


def _wants_logprobs(body: ResponsesRequest) -> bool:
    included = body.include or []
    for name in included:
        if name not in _INCLUDABLE:
            raise unimplemented("include", f"include of {name[:64]!r}")
    return _LOGPROBS in included or bool(body.top_logprobs)


def _effort(body: ResponsesRequest) -> str | None:
    if body.reasoning is None:
        return None
    _REASONING_FIELDS.refuse(body.reasoning, "reasoning.")
    return body.reasoning.effort


def store_ended(
    store: ResponseStore, owner: str, plan: ResponsePlan, stored: StoredResponse
) -> None:
    """Stores a response that has ended, if the request asks for it. Adds its items to the
    conversation that it continues, unless it failed or was cancelled."""
    if plan.history.is_stored:
        log_failure(store.put(owner, stored))
    conversation_id = plan.body.conversation_id
    if conversation_id is not None and stored.body["status"] in ("completed", "incomplete"):
        items = [*stored.input, *stored.body["output"]]
        log_failure(store.append(owner, conversation_id, items))
