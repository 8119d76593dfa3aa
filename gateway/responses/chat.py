"""Bodies of `/v1/responses` as chats: their input, the items before them, tools of namespaces."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from pydantic import TypeAdapter

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
    stored_items,
    unawaited,
)
from gateway.sampling import OutputLength, json_schema_format
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

COMPACTIONS = frozenset({"compaction", "compaction_summary"})
REQUEST = (
    "Summarize the conversation so far for whoever continues it: the task, what has been done and "
    "found, decisions, names of files and values that are still needed, and what is left to do."
)
_MARK = b"outrider:summary:"
_ITEMS = TypeAdapter(list[InputItem])
Role = Literal["system", "developer", "user", "assistant"]
_ROLES = frozenset({"system", "developer", "user", "assistant"})
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_LOGPROBS = "message.output_text.logprobs"
# There is nothing to encrypt here, and nothing of hosted tools or images to show.
_INCLUDABLE = frozenset(
    {_LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url"}
    | {"code_interpreter_call.outputs", "computer_call_output.output.image_url"}
    | {"file_search_call.results", "web_search_call.action.sources", "web_search_call.results"}
)
_HOSTED = frozenset(
    {"code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation"}
    | {"mcp", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"}
    | {"web_search_preview_2025_03_11"}
)
_FIELDS = KnownFields.of_generation(
    harmless=frozenset(
        {"client_metadata", "max_tool_calls", "prompt_cache_options", "prompt_cache_retention"}
        | {"image", "stream_options"}  # how images are shortened, of which there are none
    ),
    unimplemented=frozenset({"context_management"}),
    neutral={
        "truncation": ("disabled",),
    },
)
_TEXT_FIELDS = KnownFields(frozenset(), frozenset())
# Thoughts are shown as they are; there is no summary of them.
_REASONING_FIELDS = KnownFields(frozenset({"generate_summary", "summary"}), frozenset())


def flat_name(name: str, namespace: str | None) -> str:
    """Returns what the model calls a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def namespaces(tools: Sequence[Tool]) -> Mapping[str, tuple[str, str]]:
    """Returns the namespace and the name of each tool that is in one, by its flat name."""
    return {
        flat_name(inner.name, tool.name): (tool.name, inner.name)
        for tool in tools
        if tool.type == "namespace" and tool.name is not None
        for inner in tool.tools or ()
        if inner.name is not None
    }


def compacted(items: Sequence[InputItem], summary: str) -> list[Item]:
    """Returns the items that stand for a history. The summary is encoded, not encrypted: it is the
    client's own text."""
    users = [item for item in items if item.type == "message" and item.role == "user"]
    content = base64.b64encode(_MARK + summary.encode()).decode()
    item_id = f"cmp_{uuid.uuid4().hex}"
    return [
        *stored_items(users),
        {"id": item_id, "type": "compaction", "encrypted_content": content},
    ]


def summary_of(field: str, item: InputItem) -> str:
    """Raises:
    InvalidArgument: it is no compaction of this program's making.
    """
    try:
        content = base64.b64decode(item.encrypted_content or "", validate=True)
        if content.startswith(_MARK):
            return content.removeprefix(_MARK).decode()
    except (binascii.Error, ValueError):  # of bytes that are no UTF-8 as well
        pass
    field = f"{field}.encrypted_content"
    message = f"{field} is not what /v1/responses/compact of this gateway returns"
    raise InvalidArgument.of("FIELD_INVALID", field, message)


@dataclass(frozen=True, slots=True)
class History:
    """The conversation that a response continues.

    Attributes:
        items: all of it in order, each with the field it came in.
        own: the items of the request itself, as they are kept.
        is_kept: whether the response is kept.
    """

    items: Sequence[tuple[str, InputItem]]
    own: Sequence[Item]
    is_kept: bool


async def history_of(body: ResponsesRequest, store: ResponseStore | None, owner: str) -> History:
    """Args:
        store: None where nothing is kept.
        owner: name of the client's key.

    Raises:
        InvalidArgument: something needs a store, or the fields do not go together.
        NotFound: nothing of that name is kept for this client.
    """
    if store is None:
        _refuse_without_store(body)
        return History(_named_items(body.input), (), False)
    _check(body)
    before = await _before(body, store, owner)
    own = [
        item if not item.is_reference else await _referred(item, f"input[{index}]", store, owner)
        for index, item in enumerate(_listed(body.input))
    ]
    is_kept = body.store is not False
    return History([*before, *_named_items(own)], stored_items(own), is_kept)


async def _before(
    body: ResponsesRequest, store: ResponseStore, owner: str
) -> list[tuple[str, InputItem]]:
    if body.previous_response_id is not None:
        field, found = "previous_response_id", await store.turns(owner, body.previous_response_id)
    elif body.conversation_id is not None:
        field = "conversation"
        found = await store.entry_items(owner, body.conversation_id, CONVERSATION)
    else:
        return []
    return [(field, item) for item in _ITEMS.validate_python(found)]


async def _referred(item: InputItem, field: str, store: ResponseStore, owner: str) -> InputItem:
    if item.id is None:
        raise InvalidArgument.of("FIELD_INVALID", f"{field}.id", f"{field}.id is missing")
    return InputItem.model_validate(await store.item(owner, item.id))


def _check(body: ResponsesRequest) -> None:
    if body.previous_response_id is not None and body.conversation is not None:
        message = "conversation is set beside previous_response_id; only one may be"
        raise InvalidArgument.of("HISTORY_AMBIGUOUS", "conversation", message)
    if body.background and body.store is False:
        message = "background can only be used when `store` is true"
        raise InvalidArgument.of("STORE_OFF", "background", message)


def _refuse_without_store(body: ResponsesRequest) -> None:
    needs = {
        "previous_response_id": body.previous_response_id,
        "conversation": body.conversation,
        "background": body.background,
        "store": body.store,
    }
    for index, item in enumerate(_listed(body.input)):
        needs[f"input[{index}]"] = item.is_reference
    for field, given in needs.items():
        if given:
            raise InvalidArgument.of("STORE_OFF", field, f"{field} needs --response-store")


def _listed(given: str | list[InputItem] | None) -> list[InputItem]:
    if isinstance(given, str):
        return [InputItem(type="message", role="user", content=given)]
    return given or []


def _named_items(given: str | list[InputItem] | None) -> list[tuple[str, InputItem]]:
    return [(f"input[{index}]", item) for index, item in enumerate(_listed(given))]


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
    name = flat_name(required(f"{field}.name", item.name), item.namespace)
    function = CalledFunction(name=name, arguments=item.arguments or "{}")
    call = ToolCall(id=item.call_id, function=function)
    if messages and messages[-1].role == "assistant" and thought is None:
        messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
        return
    messages.append(ChatMessage(role="assistant", tool_calls=[call], reasoning_content=thought))


def _output(field: str, item: InputItem) -> ChatMessage:
    call_id = required(f"{field}.call_id", item.call_id)
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
        raise unread(field, part.type)
    return ContentPart(type="text", text=part.text)


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A plan, and what the response repeats of its request.

    Attributes:
        history: what comes before its input, and the input as it is kept.
        item_id: of the first message in the output.
        namespaces: of flattened names of tools, the namespace and the name in it.
    """

    plan: Plan
    body: ResponsesRequest
    history: History
    item_id: str
    namespaces: Mapping[str, tuple[str, str]]


async def response_plan(
    body: ResponsesRequest, history: History, planner: Planner, model: TargetModel
) -> ResponsePlan:
    """Raises:
    InvalidArgument: the request can never be served.
    """
    _FIELDS.refuse(body)
    refuse_rounds(body.speculation)
    chat = ChatCompletionRequest(
        messages=_messages(body, history),
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
    given = body.text.format
    if given is None:
        return None
    if given.type in ("text", "json_object"):
        return ResponseFormat(type=given.type)
    if given.type != "json_schema":
        raise unimplemented("text.format.type", f"text.format of type {given.type[:64]!r}")
    if given.content is None:
        message = "text.format.schema is missing"
        raise InvalidArgument.of("FIELD_INVALID", "text.format.schema", message)
    return json_schema_format(given.content)


def _messages(body: ResponsesRequest, history: History) -> list[ChatMessage]:
    messages = chat_messages(history.items)
    if body.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    return messages


def _tools(body: ResponsesRequest) -> list[ToolDefinition] | None:
    own = []
    for tool, namespace in _functions(body.tools or (), "tools"):
        function = FunctionDefinition(
            name=flat_name(tool.name or "", namespace),
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        own.append(ToolDefinition(type="function", function=function))
    return own


def _functions(
    tools: Sequence[Tool], field: str, namespace: str | None = None
) -> Iterator[tuple[Tool, str | None]]:
    """Yields the functions among tools, those of a namespace with its name."""
    for index, tool in enumerate(tools):
        place = f"{field}[{index}]"
        is_namespace = tool.type == "namespace" and namespace is None
        if tool.name is None and (tool.type == "function" or is_namespace):
            name = f"{place}.name"
            raise InvalidArgument.of("FIELD_INVALID", name, f"{name} is missing")
        if tool.type == "function":
            yield tool, namespace
        elif is_namespace:
            yield from _functions(tool.tools or (), f"{place}.tools", tool.name)
        elif tool.type in _HOSTED:
            leave_out_hosted(place, tool.type)
        else:
            raise unimplemented(f"{place}.type", f"a tool of type {tool.type[:64]!r}")


def _tool_choice(
    choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None,
) -> Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None:
    if isinstance(choice, NamedFunction):
        return NamedTool.of(choice.name)
    if isinstance(choice, AllowedFunctions):
        tools = [NamedTool.of(each.name) for each in choice.tools]
        return AllowedToolChoice(
            type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools)
        )
    return choice


def _wants_logprobs(body: ResponsesRequest) -> bool:
    asked = body.include or []
    for name in asked:
        if name not in _INCLUDABLE:
            raise unimplemented("include", f"include of {name[:64]!r}")
    return _LOGPROBS in asked or bool(body.top_logprobs)


def _effort(body: ResponsesRequest) -> str | None:
    if body.reasoning is None:
        return None
    _REASONING_FIELDS.refuse(body.reasoning, "reasoning.")
    return body.reasoning.effort


def keep(store: ResponseStore, owner: str, asked: ResponsePlan, stored: StoredResponse) -> None:
    """Keeps a response that has ended, as far as it was asked for."""
    if asked.history.is_kept:
        unawaited(store.put(owner, stored))
    conversation_id = asked.body.conversation_id
    if conversation_id is not None and stored.body["status"] in ("completed", "incomplete"):
        items = [*stored.input, *stored.body["output"]]
        unawaited(store.append(owner, conversation_id, items))
