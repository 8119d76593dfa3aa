"""Answers of `/v1/responses`, for the OpenAPI document. The `openai` package's type lists some two
hundred schemas of every possible server; this one lists only those that the gateway sends."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from gateway.reference.answered import Answered, AnswerMetrics, SchemaCheck, Timings

Status = Literal["completed", "incomplete"]
"""Of an item that the answer has."""


class TokenAlternative(Answered):
    """A token that might have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TokenAlternative):
    """A token of the text, and the likeliest in its place."""

    top_logprobs: list[TokenAlternative]


class OutputText(Answered):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="always empty")
    logprobs: list[TokenLogprob]


class OutputMessage(Answered):
    """A message of the assistant."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(Answered):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answered):
    """The model's reasoning before its answer."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any] = Field(description="always empty")
    content: list[ReasoningText]


class OutputCall(Answered):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    call_id: str = Field(description="names the call in its `function_call_output`")
    name: str
    arguments: str = Field(description="a JSON object, as text")
    status: Status


class IncompleteDetails(Answered):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ReasoningSettings(Answered):
    """As they were asked for."""

    effort: str | None
    summary: str | None


class TextSettings(Answered):
    """As they were asked for."""

    format: dict[str, Any]


class InputTokensDetails(Answered):
    """The parts of `input_tokens`."""

    cached_tokens: NonNegativeInt
    cache_write_tokens: NonNegativeInt


class OutputTokensDetails(Answered):
    """The parts of `output_tokens`; prediction tokens are those that drafts proposed."""

    reasoning_tokens: NonNegativeInt
    accepted_prediction_tokens: NonNegativeInt
    rejected_prediction_tokens: NonNegativeInt


class ResponseTokens(Answered):
    """Tokens of a response."""

    input_tokens: NonNegativeInt
    input_tokens_details: InputTokensDetails
    output_tokens: NonNegativeInt
    output_tokens_details: OutputTokensDetails
    total_tokens: NonNegativeInt


class ResponseConversation(Answered):
    """The conversation that it continues."""

    id: str


class ResponseAnswer(Answered):
    """Answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: float = Field(description="seconds since 1970")
    completed_at: float | None = Field(description="once it has ended")
    status: Literal["queued", "completed", "incomplete"]
    background: bool
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    service_tier: Literal["default"] | None = Field(description="where it was asked for")
    system_fingerprint: str
    user: str | None
    conversation: ResponseConversation | None
    reasoning: ReasoningSettings
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseTokens | None = Field(description="null before it has ended")
    metrics: AnswerMetrics | None
    timings: Timings | None = Field(description="null before it has ended")
    schema_check: SchemaCheck | None = Field(default=None, description="of what no grammar holds")
