"""A `/v1/responses` body as the chat it asks for."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Literal

from gateway.constraints import json_schema_format
from gateway.field_names import client_names
from gateway.generation import TargetModel
from gateway.plan import Plan
from gateway.planner import Planner
from gateway.refusals import KnownFields, refuse_rounds, unimplemented
from gateway.responses.input import chat_messages
from gateway.responses.schema import NamedFunction, ResponsesRequest
from gateway.schema import (
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
_INCLUDABLE = frozenset({_LOGPROBS, "reasoning.encrypted_content"})  # there is none to encrypt
_FIELDS = KnownFields(
    harmless=frozenset(
        {"max_tool_calls", "prompt_cache_key", "prompt_cache_options"}
        | {"prompt_cache_retention", "safety_identifier", "service_tier", "stream_options", "user"}
    ),
    unimplemented=frozenset(
        {"background", "context_management", "conversation", "image", "moderation"}
        | {"previous_response_id", "prompt", "store"}
    ),
    neutral={
        "truncation": ("disabled",),
    },
)
_TEXT_FIELDS = KnownFields(frozenset(), frozenset({"verbosity"}), {"verbosity": ("medium",)})
_REASONING_FIELDS = KnownFields(frozenset(), frozenset({"generate_summary", "summary"}))


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A plan, and what the response repeats of its request.

    Attributes:
        item_id: of the first message in the output.
    """

    plan: Plan
    body: ResponsesRequest
    item_id: str


async def response_plan(
    body: ResponsesRequest, planner: Planner, name: str, model: TargetModel, trace_id: str
) -> ResponsePlan:
    """Raises:
    InvalidArgument: the request can never be served, or needs a memory the gateway has not.
    """
    _FIELDS.refuse(body.unknown_fields)
    refuse_rounds(body.speculation)
    chat = ChatCompletionRequest(
        messages=_messages(body),
        stream=body.stream,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
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
        plan = await planner.chat(chat, name, model, trace_id)
    plan = replace(plan, request_id=f"resp_{uuid.uuid4().hex}", grammar_field="text.format")
    return ResponsePlan(plan, body, f"msg_{uuid.uuid4().hex}")


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


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    messages = chat_messages(body.input)
    if body.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    return messages


def _tools(body: ResponsesRequest) -> list[ToolDefinition] | None:
    for index, tool in enumerate(body.tools or ()):
        if tool.type != "function" or tool.name is None:
            raise unimplemented(f"tools[{index}].type", f"a tool of type {tool.type[:64]!r}")
    return [
        ToolDefinition(
            type="function",
            function=FunctionDefinition(
                name=tool.name or "",
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            ),
        )
        for tool in body.tools or ()
    ]


def _tool_choice(
    choice: Literal["none", "auto", "required"] | NamedFunction | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    if isinstance(choice, NamedFunction):
        return NamedTool(type="function", function=FunctionName(name=choice.name))
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
    _REASONING_FIELDS.refuse(body.reasoning.unknown_fields, "reasoning.")
    return body.reasoning.effort
