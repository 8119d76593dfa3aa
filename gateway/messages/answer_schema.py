"""Answers of `/v1/messages`, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from gateway.reference.answered import Answered, AnswerMetrics, SchemaCheck, Timings


class TextBlock(Answered):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answered):
    """The model's reasoning before its answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="empty: nothing signs thoughts here")


class ToolUseBlock(Answered):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = Field(description="the arguments; empty where they were cut off")


class MessageUsage(Answered):
    """Tokens of a message; cached ones are not among `input_tokens`."""

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
    stop_sequence: str | None = Field(description="the one that ended the text")
    usage: MessageUsage
    metrics: AnswerMetrics
    timings: Timings
    schema_check: SchemaCheck | None = Field(default=None, description="of what no grammar holds")
