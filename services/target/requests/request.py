"""Requests to the engine, and the events that answer them. Plain data."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from services.target.grammars.matcher import CompiledGrammar
from shared.errors import InvalidArgument
from shared.generation import (
    Delta,
    Failed,
    GenerationParams,
    PromptScored,
    PromptScoring,
    SpeculationStats,
    Started,
    check_num_top,
    check_token_ids,
)
from shared.tokens import MAX_NAMED_LOGPROBS, MAX_SALT_CHARACTERS, FinishReason, StopParams

if TYPE_CHECKING:
    from services.target.sequence import Sequence
    from shared.runtime.host_copy import HostCopy


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest(GenerationParams):
    """One prompt to continue, for the engine.

    Attributes:
        arrival_s: engine clock at submission, in seconds.
        grammar: grammar that the output must match; None allows any output.
    """

    arrival_s: float
    grammar: CompiledGrammar | None = field(default=None, kw_only=True)

    @property
    def prefix_salt(self) -> str:
        """Salt of the cached prefixes that this request may use. Requests for routed experts have
        one of their own: for the pages of other requests, experts may not have been recorded."""
        return f"{self.cache_salt}\0routes" if self.wants_routes else self.cache_salt

    @property
    def logprob_temperature(self) -> float:
        """The divisor of the logits before log probabilities are computed."""
        is_scaled = self.logprobs_after_temperature and not self.sampling.is_greedy
        return self.sampling.temperature if is_scaled else 1.0

    @property
    def scores_shaped(self) -> bool:
        """Whether log probabilities depend on more sampling parameters than the temperature."""
        if self.top_logprobs is None or not self.logprobs_after_temperature:
            return False
        is_masked = bool(self.sampling.bad_phrases or self.sampling.thinking or self.grammar)
        return self.sampling.shapes_logits or is_masked or bool(self.stop.min_output_tokens)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The model's limits that a request is checked against.

    Attributes:
        max_context_tokens: largest prompt plus output.
        max_kv_tokens: tokens the KV pool of one rank holds; a longer sequence could never run.
        num_routes: experts recorded for each token, over all layers; 0 if none are recorded.
    """

    vocab_size: int
    max_context_tokens: int
    max_kv_tokens: int
    eos_token_ids: frozenset[int]
    num_routes: int = 0

    @property
    def max_sequence_tokens(self) -> int:
        """Largest prompt plus output that can be served."""
        return min(self.max_context_tokens, self.max_kv_tokens)

    def end_token_ids(self, stop: StopParams) -> frozenset[int]:
        """Returns the tokens that end an output."""
        return stop.stop_token_ids | (frozenset() if stop.ignore_eos else self.eos_token_ids)

    def check_prompt(self, token_ids: SequenceOf[int]) -> None:
        """Raises:
        InvalidArgument: the prompt is empty, too long or names a token outside the vocabulary.
        """
        if not token_ids:
            raise InvalidArgument.prompt_empty()
        if len(token_ids) >= self.max_sequence_tokens:
            raise InvalidArgument.prompt_too_long(len(token_ids), self.max_sequence_tokens - 1)
        check_token_ids("prompt_token_ids", token_ids, self.vocab_size, reason="TOKEN_OUT_OF_RANGE")

    def check(self, request: GenerationRequest) -> None:
        """Raises:
        InvalidArgument: the request can never be served; names the field, value and limit.
        """
        self.check_prompt(request.prompt_token_ids)
        named = {
            "logprob_token_ids": request.logprob_token_ids,
            "prediction": request.predicted_token_ids,
            "stop_token_ids": request.stop.stop_token_ids,
            **request.sampling.named_token_ids,
        }
        for name, token_ids in named.items():
            check_token_ids(name, token_ids, self.vocab_size)
        stop, allowed = request.stop, set(request.sampling.allowed_token_ids)
        if stop.min_output_tokens and allowed and allowed <= self.end_token_ids(stop):
            message = "allowed_token_ids holds only tokens that min_tokens forbids at first"
            raise InvalidArgument.of("SAMPLING_PARAM_OUT_OF_RANGE", "allowed_token_ids", message)
        counts = (
            ("cache_salt", "characters", len(request.cache_salt), MAX_SALT_CHARACTERS),
            ("logprob_token_ids", "tokens", len(request.logprob_token_ids), MAX_NAMED_LOGPROBS),
            ("prediction", "tokens", len(request.predicted_token_ids), self.max_context_tokens),
        )
        for name, what, count, most in counts:
            if count > most:
                raise InvalidArgument.wrong_count(name, count, what, f"at most {most:,}")
        if request.wants_routes and not self.num_routes:
            message = (
                "return_routed_experts is true; a mixture of experts is needed, and a target that "
                "was started with --enable-return-routed-experts"
            )
            raise InvalidArgument.of("ROUTED_EXPERTS_OFF", "return_routed_experts", message)
        if request.top_logprobs is not None:
            check_num_top("top_logprobs", request.top_logprobs)
        if request.prompt_scoring is not None:
            self._check_scoring(request.prompt_scoring, len(request.prompt_token_ids))

    def _check_scoring(self, scoring: PromptScoring, num_prompt_tokens: int) -> None:
        if not 0 <= scoring.start < num_prompt_tokens:
            raise InvalidArgument.out_of_range(
                "prompt_logprob_start", scoring.start, f"[0, {num_prompt_tokens - 1}]"
            )
        check_num_top("prompt_logprobs", scoring.num_top)


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended without an error.

    Attributes:
        routes: `[tokens - 1, layers * k]` int32, the experts of each token, if requested.
    """

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    stop_token_id: int | None
    stats: SpeculationStats
    routes: HostCopy | None = None

    @classmethod
    def of(cls, sequence: Sequence, routes: HostCopy | None = None) -> Finished:
        """Returns the last event of a sequence that has ended."""
        assert sequence.finish_reason is not None
        return cls(
            sequence.finish_reason,
            sequence.num_prompt_tokens,
            sequence.num_output_tokens,
            sequence.num_cached_tokens,
            sequence.stop_token_id,
            sequence.stats,
            routes,
        )


Event = Started | PromptScored | Delta | Finished | Failed


class EventSink(Protocol):
    """Receives the events of one or more requests.

    `deliver` is called on the engine thread, once a step, and must not block.
    """

    def deliver(self, events: SequenceOf[tuple[int, Event]]) -> None:
        """Takes the events of one step; each with the key its request was submitted under."""
