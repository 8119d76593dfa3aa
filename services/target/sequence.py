"""One request while it runs: its tokens, its KV and how a round's tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.target.request import GenerationRequest, ModelLimits, SpeculationStats
from shared.kv.leases import KvLease
from shared.tokens import FinishReason, SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """A running or waiting request.

    Invariants: `token_ids` are committed and never taken back; the KV of
    `token_ids[:num_computed]` is in the lease's pages; at least one committed token, the last, is
    not computed yet.

    Attributes:
        token_ids: prompt, then output.
        num_computed: tokens whose KV is valid; 0 without a lease.
        lease: None while waiting.
        round: counts commits; fences candidates.
        finish_reason: set by the commit that ends the sequence.
        stop_token_id: the token that ended it, if one did.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
    """

    sequence_id: int
    request: GenerationRequest
    limits: ModelLimits
    token_ids: list[int]
    num_computed: int = 0
    lease: KvLease | None = None
    round: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    started: bool = False
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @classmethod
    def of(cls, sequence_id: int, request: GenerationRequest, limits: ModelLimits) -> Sequence:
        """Starts a sequence at its prompt."""
        return cls(sequence_id, request, limits, list(request.prompt_token_ids))

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def has_output(self) -> bool:
        return len(self.token_ids) > self.num_prompt_tokens

    @property
    def max_output_tokens(self) -> int:
        """The request's bound, clamped to the context."""
        room = self.limits.max_sequence_tokens - self.num_prompt_tokens
        return min(self.request.stop.max_output_tokens, room)

    @property
    def num_remaining(self) -> int:
        """Output tokens still allowed."""
        return self.max_output_tokens - self.num_output_tokens

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end this sequence."""
        stop = self.request.stop
        return (
            stop.stop_token_ids
            if stop.ignore_eos
            else (stop.stop_token_ids | self.limits.eos_token_ids)
        )

    def banned_token_ids(self, num_ahead: int) -> frozenset[int]:
        """Tokens that may not be drawn `num_ahead` tokens after the committed ones.

        Before the minimum length no stop token can be drawn; that holds at each depth of a tree
        on its own.
        """
        if self.num_output_tokens + num_ahead >= self.request.stop.min_output_tokens:
            return frozenset()
        return self.stop_token_ids

    def commit(self, drawn_token_ids: SequenceOf[int]) -> tuple[int, ...]:
        """Appends tokens up to and including the one that ends the sequence.

        Returns:
            The tokens that were appended, at least one.
        """
        assert self.finish_reason is None
        assert drawn_token_ids
        stop_token_ids = self.stop_token_ids
        committed: list[int] = []
        for token_id in drawn_token_ids:
            committed.append(token_id)
            self.token_ids.append(token_id)
            if token_id in stop_token_ids:
                self.finish_reason, self.stop_token_id = FinishReason.STOP, token_id
                break
            if self.num_remaining == 0:
                self.finish_reason = FinishReason.LENGTH
                break
        self.round += 1
        return tuple(committed)
