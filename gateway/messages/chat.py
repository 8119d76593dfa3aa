"""Anthropic's bodies as the chat they ask for."""

from __future__ import annotations

import uuid
from dataclasses import replace

from gateway.field_names import client_names
from gateway.generation import TargetModel
from gateway.messages.schema import MessagesRequest, Prompt
from gateway.plan import Plan, Planner
from gateway.refusals import KnownFields, refuse_unimplemented_message, unimplemented
from gateway.schema import ChatCompletionRequest, ChatMessage, ContentPart
from shared.errors import InvalidArgument

_FIELDS = KnownFields(
    harmless=frozenset(
        {"cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"}
        | {"user_profile_id", "workspace_id", "betas"}
    ),
    unimplemented=frozenset(
        {"container", "context_management", "mcp_servers", "output_config", "output_format"}
        | {"prefill", "tools"}
    ),
    neutral={
        "thinking": ({"type": "disabled"},),
        "tool_choice": ({"type": "auto"}, {"type": "none"}),
    },
)


async def messages_plan(
    body: MessagesRequest, planner: Planner, name: str, model: TargetModel, trace_id: str
) -> Plan:
    """Raises:
    InvalidArgument: the request can never be served; by Anthropic's name of the field.
    """
    chat = prompt_chat(body).model_copy(
        update={
            "stream": body.stream,
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "seed": body.seed,
            "speculation": body.speculation,
        }
    )
    with client_names({"stop": "stop_sequences", "prompt": "messages"}):
        plan = await planner.chat(chat, name, model, trace_id)
    return replace(plan, request_id=f"msg_{uuid.uuid4().hex}")


def prompt_chat(body: Prompt) -> ChatCompletionRequest:
    """Returns the chat of a prompt, `system` first.

    Raises:
        InvalidArgument: it has what the gateway cannot do: tools, media, prefill.
    """
    _FIELDS.refuse(body.unknown_fields)
    messages = [ChatMessage(role=each.role, content=each.content) for each in body.messages]
    if not messages:
        raise InvalidArgument.of("PROMPT_EMPTY", "messages", "messages is empty")
    for index, message in enumerate(messages):
        refuse_unimplemented_message(index, message)
    if messages[-1].role == "assistant":
        field = f"messages[{len(messages) - 1}].role"
        raise unimplemented(field, "an assistant's message at the end, to be continued,")
    if body.system:
        messages.insert(0, ChatMessage(role="system", content=_system(body.system)))
    return ChatCompletionRequest(messages=messages)


def _system(system: str | list[ContentPart]) -> str | list[ContentPart]:
    for index, part in enumerate(system):
        if isinstance(part, ContentPart) and part.type != "text":
            raise unimplemented(f"system[{index}].type", f"content of type {part.type[:64]!r}")
    return system
