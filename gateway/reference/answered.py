"""Types of answers, for the document. The gateway builds answers without them: tests hold what it
answers against them, with no field that they lack."""

from __future__ import annotations

from typing import Any, Literal

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion
from openai.types.completion_choice import Logprobs
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


class ChatAnswer(ChatCompletion):
    """Answer of `/v1/chat/completions`."""

    prompt_token_ids: list[int] | None = Field(description="with `return_token_ids`")
    prompt_logprobs: list[dict[str, Any] | None] | None
    metrics: AnswerMetrics
    timings: Timings


class CompletionLogprobs(Logprobs):
    """Log probabilities of a text; an echoed prompt's first token has none."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class CompletedText(CompletionChoice):
    """A choice."""

    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = Field(description="with `return_token_ids`")
    token_ids: list[int] | None = Field(description="with `return_token_ids`")
    prompt_logprobs: list[dict[str, Any] | None] | None


class CompletionAnswer(Completion):
    """Answer of `/v1/completions`."""

    choices: list[CompletedText]  # type: ignore[assignment]
    metrics: AnswerMetrics
    timings: Timings


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
