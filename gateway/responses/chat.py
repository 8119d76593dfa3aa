"""A `/v1/responses` body as the chat it asks for."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gateway.constraints import json_schema_format
from gateway.field_names import client_names
from gateway.generation import TargetModel
from gateway.output_length import OutputLength
from gateway.plan import Plan
from gateway.planner import Planner
from gateway.refusals import KnownFields, leave_out_hosted, refuse_rounds, unimplemented
from gateway.responses.history import History
from gateway.responses.input import chat_messages
from gateway.responses.namespaces import flat_name, namespaces
from gateway.responses.schema import AllowedFunctions, NamedFunction, ResponsesRequest, Tool
from gateway.schema import (
    AllowedToolChoice,
    AllowedTools,
    ChatCompletionRequest,
    ChatMessage,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    ResponseFormat,
    ToolDefinition,
)
from shared.errors import InvalidArgument

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
        | {"stream_options"}
    ),
    unimplemented=frozenset({"context_management", "image", "moderation"}),
    neutral={
        "truncation": ("disabled",),
    },
)
_TEXT_FIELDS = KnownFields(frozenset(), frozenset())
# Thoughts are shown as they are; there is no summary of them.
_REASONING_FIELDS = KnownFields(frozenset({"generate_summary", "summary"}), frozenset())


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
    body: ResponsesRequest,
    history: History,
    planner: Planner,
    name: str,
    model: TargetModel,
    trace_id: str,
) -> ResponsePlan:
    """Raises:
    InvalidArgument: the request can never be served.
    """
    _FIELDS.refuse(body.unknown_fields)
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
        speculation=body.speculation,
    )
    with client_names({"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}):
        length = OutputLength(body.max_output_tokens, "max_output_tokens", is_capped=True)
        plan = await planner.chat(chat, name, model, trace_id, length=length)
    plan = replace(plan, request_id=f"resp_{uuid.uuid4().hex}", grammar_field="text.format")
    item_id = f"msg_{uuid.uuid4().hex}"
    return ResponsePlan(plan, body, history, item_id, namespaces(body.tools or ()))


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    if body.text is None:
        return None
    _TEXT_FIELDS.refuse(body.text.unknown_fields, "text.")
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
    return [
        ToolDefinition(
            type="function",
            function=FunctionDefinition(
                name=flat_name(tool.name or "", namespace),
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            ),
        )
        for tool, namespace in _functions(body.tools or (), "tools")
    ]


def _functions(
    tools: Sequence[Tool], field: str, namespace: str | None = None
) -> Iterator[tuple[Tool, str | None]]:
    """Yields the functions among tools, those of a namespace with its name."""
    for index, tool in enumerate(tools):
        place = f"{field}[{index}]"
        if tool.type == "function" and tool.name is not None:
            yield tool, namespace
        elif tool.type == "namespace" and tool.name is not None and namespace is None:
            yield from _functions(tool.tools or (), f"{place}.tools", tool.name)
        elif tool.type in _HOSTED:
            leave_out_hosted(place, tool.type)
        else:
            raise unimplemented(f"{place}.type", f"a tool of type {tool.type[:64]!r}")


def _tool_choice(
    choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None,
) -> Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None:
    if isinstance(choice, NamedFunction):
        return _named(choice)
    if isinstance(choice, AllowedFunctions):
        tools = [_named(each) for each in choice.tools]
        return AllowedToolChoice(
            type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools)
        )
    return choice


def _named(choice: NamedFunction) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=choice.name))


def _wants_logprobs(body: ResponsesRequest) -> bool:
    asked = body.include or []
    for name in asked:
        if name not in _INCLUDABLE:
            raise unimplemented("include", f"include of {name[:64]!r}")
    return _LOGPROBS in asked or bool(body.top_logprobs)


def _effort(body: ResponsesRequest) -> str | None:
    if body.reasoning is None:
        return None
    _REASONING_FIELDS.refuse(body.reasoning.unknown_fields, "reasoning.")
    return body.reasoning.effort
