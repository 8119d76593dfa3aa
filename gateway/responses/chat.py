"""A `/v1/responses` body as the chat it asks for."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Literal, cast

from gateway.field_names import client_names
from gateway.generation import TargetModel
from gateway.plan import Plan, Planner
from gateway.refusals import KnownFields, unimplemented
from gateway.responses.schema import InputItem, ResponsesRequest
from gateway.schema import ChatCompletionRequest, ChatMessage, ContentPart
from shared.errors import InvalidArgument

Role = Literal["system", "developer", "user", "assistant"]

_ROLES = frozenset({"system", "developer", "user", "assistant"})
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset({_LOGPROBS, "reasoning.encrypted_content"})  # there is none to encrypt
_FIELDS = KnownFields(
    harmless=frozenset(
        {"max_tool_calls", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options"}
        | {"prompt_cache_retention", "safety_identifier", "service_tier", "stream_options", "user"}
    ),
    unimplemented=frozenset(
        {"background", "context_management", "conversation", "image", "moderation"}
        | {"previous_response_id", "prompt", "store", "tools"}
    ),
    neutral={
        "text": ({"format": {"type": "text"}},),
        "tool_choice": ("auto", "none"),
        "truncation": ("disabled",),
    },
)
_REASONING_FIELDS = KnownFields(frozenset(), frozenset({"generate_summary", "summary"}))


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A plan, and what the response repeats of its request.

    Attributes:
        item_id: of the one message in the output.
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
        speculation=body.speculation,
    )
    with client_names({"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}):
        plan = await planner.chat(chat, name, model, trace_id)
    plan = replace(plan, request_id=f"resp_{uuid.uuid4().hex}")
    return ResponsePlan(plan, body, f"msg_{uuid.uuid4().hex}")


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    items = body.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    if not items:
        raise InvalidArgument.of("PROMPT_EMPTY", "input", "input is empty")
    messages = [_message(index, item) for index, item in enumerate(items)]
    if body.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    return messages


def _message(index: int, item: InputItem) -> ChatMessage:
    if item.type != "message":
        raise unimplemented(f"input[{index}].type", f"an item of type {item.type[:64]!r}")
    if item.role not in _ROLES:
        message = f"role is {item.role!r}; it must be one of {', '.join(sorted(_ROLES))}"
        raise InvalidArgument.of("FIELD_INVALID", f"input[{index}].role", message)
    content = item.content
    if isinstance(content, list):
        content = [_part(f"input[{index}].content[{n}]", part) for n, part in enumerate(content)]
    return ChatMessage(role=cast("Role", item.role), content=content)


def _part(field: str, part: ContentPart) -> ContentPart:
    if part.type not in _TEXT_PARTS:
        raise unimplemented(f"{field}.type", f"content of type {part.type[:64]!r}")
    return ContentPart(type="text", text=part.text)


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
