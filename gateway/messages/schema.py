"""Bodies of Anthropic's `/v1/messages`, and of its answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from gateway.reference.answered import Answered, AnswerMetrics, SchemaCheck, Timings
from gateway.schema import Body, ContentPart, Flag, Items, SharedFields, Speculation, Thinking


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
