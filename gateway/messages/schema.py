"""Bodies of Anthropic's `/v1/messages` and of its answers, and its requests planned as chats.

Tool calls, their results and thinking are blocks of a turn's content."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from gateway.constraints import json_schema_format
from gateway.failures import client_names, give_notice
from gateway.generation import TargetModel
from gateway.openapi import Answered, AnswerMetrics, SchemaCheck, Timings
from gateway.output.style import OutputStyle, ReasoningParser
from gateway.planner import Plan, Planner
from gateway.sampling import OutputLength
from gateway.schema import (
    Body,
    CalledFunction,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    Flag,
    FunctionDefinition,
    Items,
    KnownFields,
    NamedTool,
    ResponseFormat,
    SharedFields,
    Speculation,
    Thinking,
    ToolCall,
    ToolDefinition,
    check_texts,
    leave_out_hosted,
    refuse_rounds,
    required,
    unimplemented,
    unread,
)
from shared.errors import InvalidArgument

_CLEAR_THINKING = "clear_thinking_20251015"
# These edits shorten prompts above a number of tokens. The gateway never shortens prompts.
_NEVER_APPLIED = ("clear_tool_uses_", "compact_")
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})
_HARMLESS = frozenset(
    {"betas", "cache_control", "diagnostics", "inference_geo", "metadata", "speed"}
    | {"user_profile_id", "workspace_id"}
)
_UNIMPLEMENTED = frozenset({"compaction", "container", "mcp_servers", "prefill", "thread"})
_FIELDS = KnownFields.of_generation(_HARMLESS, _UNIMPLEMENTED)
_COUNTED_FIELDS = KnownFields(_HARMLESS, _UNIMPLEMENTED)
_HOSTED_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "advisor_")


class Block(Body):
    """A block of a turn's content; which fields count depends on its type."""

    type: str = Field(description="text, tool_use, tool_result, thinking or redacted_thinking")
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Items[ContentPart] | None = None
    is_error: Flag = False
    thinking: str | None = None


class Message(Body):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class Tool(Body):
    """A tool the model may use."""

    type: str | None = Field(default=None, description="custom, or none")
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: Flag = False


class ToolChoice(Body):
    """Whether the model uses tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag = False


class ContextEdit(Body):
    """An edit that leaves out parts of the turns."""

    type: str = Field(description="clear_thinking_20251015; others are never applied")
    keep: str | dict[str, Any] | None = None


class ContextManagement(Body):
    """Edits of the turns, applied in order."""

    edits: Items[ContextEdit] | None = None


class Prompt(Body):
    """Body of `/v1/messages/count_tokens`; `/v1/messages` has these fields, too."""

    model: str
    messages: Items[Message]
    system: str | Items[ContentPart] | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(
        default=None, description="no effect: both tiers are served alike"
    )


class OutputFormat(Body):
    """The format of the text: a JSON value."""

    type: Literal["json_schema"]
    content: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(Body):
    """Options of the output: its format and the reasoning effort."""

    effort: str | None = Field(default=None, description="handed to the chat template")
    format: OutputFormat | None = None


class MessagesRequest(Prompt, SharedFields):
    """Body of `/v1/messages`."""

    max_tokens: int
    stream: Flag = False
    stop_sequences: Items[str] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        default=None, description="the older name of `output_config.format`"
    )
    speculation: Speculation | None = None


class TextBlock(Answered):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answered):
    """The model's reasoning before its answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="empty: reasoning is not signed here")


class ToolUseBlock(Answered):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = Field(description="the arguments; empty if they were cut off")


class MessageUsage(Answered):
    """Tokens of a message; `input_tokens` leaves out cached tokens."""

    input_tokens: NonNegativeInt
    cache_read_input_tokens: NonNegativeInt
    cache_creation_input_tokens: NonNegativeInt
    output_tokens: NonNegativeInt


class MessageAnswer(Answered):
    """Answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    system_fingerprint: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None = Field(description="the stop sequence that ended the text")
    usage: MessageUsage
    metrics: AnswerMetrics
    timings: Timings
    schema_check: SchemaCheck | None = Field(
        default=None, description="of the parts of a schema that no grammar enforces"
    )


def chat_messages(turns: Sequence[Message]) -> list[ChatMessage]:
    """Returns the messages of a chat.

    Raises:
        InvalidArgument: the type of a block is not implemented, or a block lacks a field.
    """
    messages: list[ChatMessage] = []
    for index, turn in enumerate(turns):
        if isinstance(turn.content, str):
            messages.append(ChatMessage(role=turn.role, content=turn.content))
        elif turn.role == "assistant":
            messages.append(_assistant(f"messages[{index}]", turn.content))
        else:
            messages += _input_messages(f"messages[{index}]", turn)
    return messages


def _assistant(field: str, blocks: Sequence[Block]) -> ChatMessage:
    texts: list[ContentPart] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        block_field = f"{field}.content[{number}]"
        if block.type == "text":
            texts.append(ContentPart(type="text", text=block.text))
        elif block.type == "tool_use":
            name = required(f"{block_field}.name", block.name)
            function = CalledFunction(name=name, arguments=block.input or {})
            calls.append(ToolCall(id=block.id, function=function))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            raise unread(block_field, block.type)
    return ChatMessage(
        role="assistant",
        content=texts,
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _input_messages(field: str, turn: Message) -> list[ChatMessage]:
    """Returns the messages of a user or system turn: one per tool result, then the text."""
    results: list[ChatMessage] = []
    texts: list[ContentPart] = []
    for number, block in enumerate(turn.content):
        assert isinstance(block, Block)
        block_field = f"{field}.content[{number}]"
        if block.type == "text":
            texts.append(ContentPart(type="text", text=block.text))
        elif block.type == "tool_result":
            call_id = required(f"{block_field}.tool_use_id", block.tool_use_id)
            content = block.content or ""
            check_texts(f"{block_field}.content", content)
            results.append(ChatMessage(role="tool", tool_call_id=call_id, content=content))
        else:
            raise unread(block_field, block.type)
    if texts or not results:
        return [*results, ChatMessage(role=turn.role, content=texts)]
    return results


def edited(turns: Sequence[Message], management: ContextManagement | None) -> Sequence[Message]:
    """Applies the edits of `context_management` to the turns.

    Raises:
        InvalidArgument: the type of an edit is not implemented.
    """
    for index, edit in enumerate(() if management is None else management.edits or ()):
        field = f"context_management.edits[{index}]"
        if edit.type.startswith(_NEVER_APPLIED):
            give_notice(f"{field} is never applied: prompts are not shortened here")
            continue
        if edit.type != _CLEAR_THINKING:
            raise unimplemented(f"{field}.type", f"{field}.type {edit.type[:64]!r}")
        turns = _without_thoughts(turns, _num_turns_to_keep(edit, field))
    return turns


def _num_turns_to_keep(edit: ContextEdit, field: str) -> int | None:
    """Returns how many of the assistant's last turns keep their thoughts; None for all."""
    keep = edit.keep
    if keep is None:
        return 1
    if keep == "all" or keep == {"type": "all"}:
        return None
    value = keep.get("value") if isinstance(keep, dict) else None
    if type(value) is not int or value < 1:
        message = f"{field}.keep must be all, or thinking_turns with a value of at least 1"
        raise InvalidArgument.of("FIELD_INVALID", f"{field}.keep", message)
    return value


def _without_thoughts(turns: Sequence[Message], num_kept: int | None) -> Sequence[Message]:
    cleared: dict[int, Message] = {}
    for index, turn in enumerate(turns if num_kept is not None else ()):
        if turn.role == "assistant" and not isinstance(turn.content, str):
            blocks = [block for block in turn.content if block.type not in _THOUGHTS]
            if len(blocks) < len(turn.content):
                cleared[index] = turn.model_copy(update={"content": blocks})
    for index in list(cleared)[-num_kept:] if num_kept else ():
        del cleared[index]
    return [cleared.get(index, turn) for index, turn in enumerate(turns)]


async def messages_plan(body: MessagesRequest, planner: Planner, model: TargetModel) -> Plan:
    """Plans a request.

    Raises:
        InvalidArgument: the request can never be served; names the field as Anthropic does.
    """
    refuse_rounds(body.speculation)
    response_format, field = _response_format(body)
    chat = prompt_chat(body, planner.text.style).model_copy(
        update={
            "stream": body.stream,
            **body.shared_fields,
            "thinking_token_budget": planner.thinking_budget(
                body.thinking_token_budget, body.thinking
            ),
            "stop": body.stop if body.stop_sequences is None else body.stop_sequences,
            "response_format": response_format,
            "reasoning_effort": body.output_config and body.output_config.effort,
            "speculation": body.speculation,
        }
    )
    with client_names({"stop": "stop_sequences", "prompt": "messages"}):
        length = OutputLength(body.max_tokens, "max_tokens", is_capped=True)
        plan = await planner.chat(chat, model, length=length)
    return replace(plan, request_id=f"msg_{uuid.uuid4().hex}", grammar_field=field)


def _response_format(body: MessagesRequest) -> tuple[ResponseFormat | None, str]:
    """Returns the format in OpenAI's form, and the field it came in."""
    if body.output_config is not None and body.output_config.format is not None:
        output_format, field = body.output_config.format, "output_config.format"
    elif body.output_format is not None:
        output_format, field = body.output_format, "output_format"
    else:
        return None, ""
    return json_schema_format(output_format.content), field


def prompt_chat(body: Prompt, style: OutputStyle) -> ChatCompletionRequest:
    """Returns the prompt as a chat, `system` first.

    Raises:
        InvalidArgument: the prompt asks for something that is not implemented, such as media.
    """
    known_fields = _FIELDS if isinstance(body, MessagesRequest) else _COUNTED_FIELDS
    known_fields.refuse(body)
    messages = chat_messages(edited(body.messages, body.context_management))
    if not messages:
        raise InvalidArgument.of("PROMPT_EMPTY", "messages", "messages is empty")
    is_prefilled = messages[-1].role == "assistant"
    if is_prefilled and messages[-1].tool_calls:
        field = f"messages[{len(body.messages) - 1}].role"
        raise unimplemented(field, "an assistant's call at the end, to be continued,")
    if body.system:
        check_texts("system", body.system)
        messages.insert(0, ChatMessage(role="system", content=body.system))
    is_thinking = _is_thinking(body.thinking, style)
    return ChatCompletionRequest(
        messages=messages,
        tools=_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        include_reasoning=is_thinking,
        continue_final_message=is_prefilled,
        enable_thinking=is_thinking,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _tools(body: Prompt) -> list[ToolDefinition] | None:
    definitions = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type in (None, "custom"):
            function = FunctionDefinition(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            )
            definitions.append(ToolDefinition(type="function", function=function))
        elif tool.type.startswith(_HOSTED_TOOLS):
            leave_out_hosted(f"tools[{index}]", tool.type)
        else:
            raise unimplemented(f"tools[{index}].type", f"a tool of type {tool.type[:64]!r}")
    return definitions


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
    return NamedTool.of(choice.name)


def _is_thinking(thinking: Thinking | None, style: OutputStyle) -> bool:
    if thinking is None or thinking.type == "disabled":
        return False
    if thinking.type == "adaptive":  # the model decides; one that cannot reason never does
        return style.reasoning is not ReasoningParser.NONE
    if style.reasoning is ReasoningParser.NONE:
        give_notice("thinking has no effect: the model does not set thoughts apart")
        return False
    return True
