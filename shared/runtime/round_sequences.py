"""Sequences on their way into rounds on the device, and what rounds did to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.runtime.round_state import SlotSequence
from shared.tokens import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A sequence that is to take part.

    Attributes:
        token_ids: committed, at least two; all but the last are computed by the target, and their
            features are in `feature_rows`.
        pages: the target's, in logical order.
        head_pages: the head's; cover one row a token but the last.
        num_head_rows: the first rows, whose keys and values are in `head_pages` already.
        num_prompt_tokens: how many of the tokens are the prompt.
        min_length: tokens that there must be before one of `stop_token_ids` may be drawn.
        top_logprobs: alternatives to report for each token; None reports no log probability.
        logprob_temperature: what logits are divided by for them.
    """

    sequence_id: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    pages: Sequence[int]
    head_pages: Sequence[int]
    num_head_rows: int
    num_prompt_tokens: int = 0
    min_length: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    logprob_temperature: float = 1.0

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_shaped(self) -> bool:
        """Whether more than temperature and cuts shapes what it draws from."""
        is_early = bool(self.stop_token_ids) and len(self.token_ids) < self.min_length
        return self.sampling.shapes_logits or is_early

    @property
    def in_slot(self) -> SlotSequence:
        """What its slot holds of it."""
        tokens = self.token_ids
        return SlotSequence(len(tokens), tokens[-1], self.sampling, self.pages, self.head_pages)


@dataclass(frozen=True, slots=True)
class SequenceRound:
    """What a round did to one sequence.

    Attributes:
        token_ids: committed, the bonus token last; at least one.
        num_drafted: nodes of its tree.
        logprobs: of each token; empty where none are wanted.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    num_drafted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
