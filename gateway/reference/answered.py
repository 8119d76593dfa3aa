"""Types of answers, for the document. The gateway builds answers without them: tests hold what it
answers against them, with no field that they lack."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt


def _without_defaults(schema: dict[str, Any]) -> None:
    """Removes defaults from a schema: a field that is absent from an answer has no value."""
    for each in schema["properties"].values():
        each.pop("default", None)


class Answered(BaseModel):
    """A JSON object of an answer. Fields without a default are always there."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_extra=_without_defaults)


class SpeculationMetrics(Answered):
    """Speculation figures of an answer."""

    mean_acceptance_length: float = Field(
        ge=1, description="tokens of a round that verified a tree, the bonus token included"
    )
    draft_acceptance_rate: float = Field(ge=0, le=1)
    acceptance_histogram: list[NonNegativeInt] = Field(
        description="element n counts the rounds that accepted n draft tokens"
    )
    num_spec_steps: NonNegativeInt
    num_accepted_draft_tokens: NonNegativeInt
    num_draft_tokens: NonNegativeInt
    num_spec_tokens: NonNegativeInt = Field(description="the deepest path that was accepted")


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
    """Whether an answer keeps to the part of its schema that no grammar holds."""

    valid: bool | None = Field(description="null where it could not be checked")
    error: str | None = Field(description="what is wrong first")
    path: str | None = Field(description="where, as a JSON pointer")


class TokenAlternative(Answered):
    """A token that might have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TokenAlternative):
    """A token of the text, and the likeliest in its place."""

    top_logprobs: list[TokenAlternative]


class PromptUsage(Answered):
    """Of the tokens of the prompt."""

    cached_tokens: NonNegativeInt


class OutputUsage(Answered):
    """Of the tokens of the output. Drafts are predictions, too."""

    accepted_prediction_tokens: NonNegativeInt
    rejected_prediction_tokens: NonNegativeInt
    reasoning_tokens: NonNegativeInt


class Usage(Answered):
    """Tokens of a request; its prompt counts once, whatever `n`."""

    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    total_tokens: NonNegativeInt
    prompt_tokens_details: PromptUsage
    completion_tokens_details: OutputUsage
    reasoning_tokens: NonNegativeInt = Field(description="where SGLang has it")


class TracedTree(Answered):
    """The tree of a round; its lists have one element a node."""

    token_ids: list[int]
    texts: list[str]
    parents: list[int | None] = Field(description="node of each node's parent; null is the root")
    log_probs: list[float] = Field(description="the draft's, given the parent")


class TracedToken(Answered):
    """A token that a round added to the output."""

    id: int
    text: str
    source: Literal["accepted", "bonus", "plain"]


class TracedRound(Answered):
    """One step of the target, when `speculation.trace` asks for it."""

    round: NonNegativeInt
    algorithm: str | None
    rows: int = Field(description="tokens the target computed at once, of all requests")
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
        description="the `stop` text or the token of `stop_token_ids` that ended it, as vLLM tells"
    )
    matched_stop: str | int | None = Field(description="the same, the model's own end included")
    schema_check: SchemaCheck | None = Field(
        default=None, description="absent where a grammar holds the schema, or there is none"
    )
    token_ids: list[int] | None = Field(description="with `return_token_ids`")
    speculation: TracedChoice | None = Field(
        default=None, description="absent without `speculation.trace`"
    )


class CalledFunction(Answered):
    """A function, and what it is called with."""

    name: str
    arguments: str = Field(description="a JSON object, as text")


class ChatCall(Answered):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answered):
    """The answer of the assistant."""

    role: Literal["assistant"]
    content: str | None = Field(description="null where there are calls alone")
    refusal: None
    tool_calls: list[ChatCall] = Field(default=[], description="absent where there are none")
    reasoning_content: str = Field(default="", description="absent where there is none")
    reasoning: str = Field(default="", description="the same, by vLLM's newer name")


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
        description="of weights, version and settings: what outputs depend on"
    )
    service_tier: Literal["default"] | None = Field(
        default=None, description="absent where it was not asked"
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
