"""Types of answers, for the OpenAPI document only. The gateway builds its answers without these
types; tests check that every answer fits its type and has no field beyond it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt


def _without_defaults(schema: dict[str, Any]) -> None:
    """Removes defaults from a schema: a field that is absent from an answer has no value."""
    for field in schema["properties"].values():
        field.pop("default", None)


class Answered(BaseModel):
    """A JSON object in an answer. Fields without a default are always present."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_extra=_without_defaults)


class SpeculationMetrics(Answered):
    """Speculation figures of an answer."""

    mean_acceptance_length: float = Field(
        ge=1, description="mean tokens per round that verified a tree, bonus token included"
    )
    draft_acceptance_rate: float = Field(ge=0, le=1)
    acceptance_histogram: list[NonNegativeInt] = Field(
        description="element n counts the rounds that accepted n draft tokens"
    )
    num_spec_steps: NonNegativeInt
    num_accepted_draft_tokens: NonNegativeInt
    num_draft_tokens: NonNegativeInt
    num_spec_tokens: NonNegativeInt = Field(description="length of the longest accepted path")


class AnswerMetrics(Answered):
    """Figures of one answer, under vLLM's names."""

    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float = Field(description="from the first token to the last")
    mean_itl_ms: float = Field(default=0.0, description="absent for a single token")
    tokens_per_second: float
    speculative_decoding: SpeculationMetrics | None = Field(
        description="null when no tree was verified"
    )


class Timings(Answered):
    """Durations of an answer, under llama.cpp's names."""

    queue_ms: float
    cache_n: NonNegativeInt
    prompt_n: NonNegativeInt
    prompt_ms: float
    prompt_per_second: float
    predicted_n: NonNegativeInt
    predicted_ms: float = Field(description="from the first token to the last")
    predicted_per_second: float
    draft_n: NonNegativeInt
    draft_n_accepted: NonNegativeInt


class SchemaCheck(Answered):
    """Whether an answer satisfies the parts of its schema that no grammar enforces."""

    valid: bool | None = Field(description="null if it could not be checked")
    error: str | None = Field(description="the first violation")
    path: str | None = Field(description="place of the violation, as a JSON pointer")


class TokenAlternative(Answered):
    """An alternative to a token of the text."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TokenAlternative):
    """A token of the text, and the likeliest tokens in its place."""

    top_logprobs: list[TokenAlternative]


class PromptUsage(Answered):
    """The parts of `prompt_tokens`."""

    cached_tokens: NonNegativeInt


class OutputUsage(Answered):
    """The parts of `completion_tokens`; prediction tokens include tokens proposed by drafts."""

    accepted_prediction_tokens: NonNegativeInt
    rejected_prediction_tokens: NonNegativeInt
    reasoning_tokens: NonNegativeInt


class Usage(Answered):
    """Tokens of a request; its prompt counts once, whatever `n` is."""

    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    total_tokens: NonNegativeInt
    prompt_tokens_details: PromptUsage
    completion_tokens_details: OutputUsage
    reasoning_tokens: NonNegativeInt = Field(description="the same count, in SGLang's place")


class TracedTree(Answered):
    """The candidate tree of a round; its lists have one element per node."""

    token_ids: list[int]
    texts: list[str]
    parents: list[int | None] = Field(description="index of each node's parent; null: the root")
    log_probs: list[float] = Field(description="draft log probabilities, given the parent")


class TracedToken(Answered):
    """A token that a round added to the output."""

    id: int
    text: str
    source: Literal["accepted", "bonus", "plain"]


class TracedRound(Answered):
    """One step of the target, when `speculation.trace` asks for it."""

    round: NonNegativeInt
    algorithm: str | None
    rows: int = Field(description="tokens of all requests in this step of the target")
    wait_ms: float
    verify_ms: float
    draft_ms: float | None
    tree: TracedTree | None
    accepted_nodes: list[int]
    tokens: list[TracedToken]


class TracedChoice(Answered):
    """The rounds of a choice."""

    rounds: list[TracedRound]


class AnsweredChoice(Answered):
    """What choices of chats and completions have in common."""

    index: NonNegativeInt
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = Field(
        description="the `stop` text or `stop_token_ids` token that ended the output, as in vLLM"
    )
    matched_stop: str | int | None = Field(description="the same, but also for the model's EOS")
    schema_check: SchemaCheck | None = Field(
        default=None, description="absent without a schema, or if a grammar enforces it all"
    )
    token_ids: list[int] | None = Field(description="with `return_token_ids`")
    speculation: TracedChoice | None = Field(
        default=None, description="absent without `speculation.trace`"
    )


class CalledFunction(Answered):
    """A function and the arguments of a call."""

    name: str
    arguments: str = Field(description="a JSON object, as text")


class ChatCall(Answered):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answered):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None = Field(description="null if there are only tool calls")
    refusal: None
    tool_calls: list[ChatCall] = Field(default=[], description="absent without calls")
    reasoning_content: str = Field(default="", description="absent without reasoning")
    reasoning: str = Field(default="", description="the same text, under vLLM's newer name")


class ChatLogprobs(Answered):
    """Log probabilities of an answer."""

    content: list[TokenLogprob]
    refusal: None


class ChatChoice(AnsweredChoice):
    """A choice."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(Answered):
    """Log probabilities of a text; an echoed prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[NonNegativeInt]


class CompletedText(AnsweredChoice):
    """A choice."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = Field(description="with `return_token_ids`")
    prompt_logprobs: list[dict[str, Any] | None] | None


class OpenAIAnswer(Answered):
    """What answers of chats and completions have in common."""

    id: str
    created: NonNegativeInt = Field(description="seconds since 1970")
    model: str
    system_fingerprint: str | None = Field(
        description="identifies weights, version and settings: all that outputs depend on"
    )
    service_tier: Literal["default"] | None = Field(
        default=None, description="absent unless the request set it"
    )
    usage: Usage
    metrics: AnswerMetrics
    timings: Timings


class ChatAnswer(OpenAIAnswer):
    """Answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = Field(description="with `return_token_ids`")
    prompt_logprobs: list[dict[str, Any] | None] | None


class CompletionAnswer(OpenAIAnswer):
    """Answer of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletedText]
