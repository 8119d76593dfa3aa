"""Anthropic's bodies as the chat they ask for."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Literal

from gateway.constraints import json_schema_format
from gateway.field_names import client_names
from gateway.generation import TargetModel
from gateway.messages.context_edits import edited
from gateway.messages.schema import MessagesRequest, Prompt, Thinking, ToolChoice
from gateway.messages.turns import chat_messages
from gateway.notices import give_notice
from gateway.output.families import ReasoningParser
from gateway.output.style import OutputStyle
from gateway.output_length import OutputLength
from gateway.plan import Plan
from gateway.planner import Planner
from gateway.refusals import (
    KnownFields,
    leave_out_hosted,
    refuse_rounds,
    unimplemented,
)
from gateway.schema import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    ResponseFormat,
    ToolDefinition,
)
from gateway.text.model_text import ModelText
from shared.errors import InvalidArgument

_HARMLESS = frozenset(
    {"betas", "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"}
    | {"user_profile_id", "workspace_id"}
)
_UNIMPLEMENTED = frozenset({"container", "mcp_servers", "prefill"})
_FIELDS = KnownFields.of_generation(_HARMLESS, _UNIMPLEMENTED)
_COUNTED_FIELDS = KnownFields(_HARMLESS, _UNIMPLEMENTED)
_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "advisor_")


async def messages_plan(
    body: MessagesRequest, planner: Planner, name: str, model: TargetModel, trace_id: str
) -> Plan:
    """Raises:
    InvalidArgument: the request can never be served; by Anthropic's name of the field.
    """
    refuse_rounds(body.speculation)
    response_format, field = _response_format(body)
    chat = prompt_chat(body, planner.text.style).model_copy(
        update={
            "stream": body.stream,
            **body.shared_fields,
            "thinking_token_budget": _budget(body, planner.text),
            "stop": body.stop if body.stop_sequences is None else body.stop_sequences,
            "response_format": response_format,
            "reasoning_effort": body.output_config and body.output_config.effort,
            "speculation": body.speculation,
        }
    )
    with client_names({"stop": "stop_sequences", "prompt": "messages"}):
        length = OutputLength(body.max_tokens, "max_tokens", is_capped=True)
        plan = await planner.chat(chat, name, model, trace_id, length=length)
    return replace(plan, request_id=f"msg_{uuid.uuid4().hex}", grammar_field=field)


def _budget(body: MessagesRequest, text: ModelText) -> int | None:
    """Returns the bound of thoughts, which Anthropic's clients give whatever the model is."""
    if body.thinking_token_budget is not None:
        return body.thinking_token_budget
    if body.thinking is None or body.thinking.budget_tokens is None:
        return None
    if text.style.reasoning is ReasoningParser.NONE:
        return None
    if text.thinking_marks is None:
        give_notice("thinking.budget_tokens has no effect: thoughts of this model have no bound")
        return None
    return body.thinking.budget_tokens


def _response_format(body: MessagesRequest) -> tuple[ResponseFormat | None, str]:
    """Returns OpenAI's name of the format, and the field it came in."""
    if body.output_config is not None and body.output_config.format is not None:
        given, field = body.output_config.format, "output_config.format"
    elif body.output_format is not None:
        given, field = body.output_format, "output_format"
    else:
        return None, ""
    return json_schema_format(given.content), field


def prompt_chat(body: Prompt, style: OutputStyle) -> ChatCompletionRequest:
    """Returns the chat of a prompt, `system` first.

    Raises:
        InvalidArgument: it has what the gateway cannot do: media, prefill.
    """
    known = _FIELDS if isinstance(body, MessagesRequest) else _COUNTED_FIELDS
    known.refuse(body.unknown_fields)
    messages = chat_messages(edited(body.messages, body.context_management))
    if not messages:
        raise InvalidArgument.of("PROMPT_EMPTY", "messages", "messages is empty")
    is_prefilled = messages[-1].role == "assistant"
    if is_prefilled and messages[-1].tool_calls:
        field = f"messages[{len(body.messages) - 1}].role"
        raise unimplemented(field, "an assistant's call at the end, to be continued,")
    if body.system:
        messages.insert(0, ChatMessage(role="system", content=_system(body.system)))
    is_thinking = _is_thinking(body.thinking, style)
    return ChatCompletionRequest(
        messages=messages,
        tools=_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        include_reasoning=is_thinking,
        continue_final_message=is_prefilled,
        # Templates of models that can do without have one of these.
        chat_template_kwargs={"enable_thinking": is_thinking, "thinking": is_thinking},
    )


def _tools(body: Prompt) -> list[ToolDefinition] | None:
    own = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type in (None, "custom"):
            own.append(tool)
        elif tool.type.startswith(_HOSTED):
            leave_out_hosted(f"tools[{index}]", tool.type)
        else:
            raise unimplemented(f"tools[{index}].type", f"a tool of type {tool.type[:64]!r}")
    return [
        ToolDefinition(
            type="function",
            function=FunctionDefinition(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            ),
        )
        for tool in own
    ]


def _tool_choice(
    choice: ToolChoice | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    if choice is None or choice.type == "auto":
        return None
    if choice.type == "none":
        return "none"
    if choice.type == "any":
        return "required"
    if choice.name is None:
        message = "tool_choice.name is missing; a choice of type tool needs it"
        raise InvalidArgument.of("FIELD_INVALID", "tool_choice.name", message)
    return NamedTool(type="function", function=FunctionName(name=choice.name))


def _is_thinking(thinking: Thinking | None, style: OutputStyle) -> bool:
    if thinking is None or thinking.type == "disabled":
        return False
    if thinking.type == "adaptive":  # the model decides, and one that cannot has decided
        return style.reasoning is not ReasoningParser.NONE
    if style.reasoning is ReasoningParser.NONE:
        give_notice("thinking has no effect: the model does not set thoughts apart")
        return False
    return True


def _system(system: str | list[ContentPart]) -> str | list[ContentPart]:
    for index, part in enumerate(system):
        if isinstance(part, ContentPart) and part.type != "text":
            raise unimplemented(f"system[{index}].type", f"content of type {part.type[:64]!r}")
    return system
