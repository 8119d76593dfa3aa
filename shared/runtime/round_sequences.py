"""Sequences on their way into rounds on the device, and what rounds did to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.runtime.round_state import SlotSequence
from shared.tokens import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NewLane:
    """A sequence that is to take part.

    Attributes:
        token_ids: committed, at least two.
        pages: the target's, in logical order.
        head_pages: the head's; cover one row a token but the last.
        num_head_rows: the first rows, whose keys and values are in `head_pages` already.
        num_computed: tokens that the target has computed, at least one, and whose features are in
            `feature_rows`. The first round computes the others; None is all but the last.
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
    num_computed: int | None = None
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
    def reads_prompt(self) -> bool:
        """Whether the first round computes more than the last token."""
        return len(self.uncomputed_token_ids) > 1

    @property
    def uncomputed_token_ids(self) -> Sequence[int]:
        """The tokens that the first round computes, the last one at least."""
        return self.token_ids[-1 if self.num_computed is None else self.num_computed :]

    def in_slot(self, start: int, *, is_last: bool = True) -> SlotSequence:
        """Returns what a slot holds whose first row is the token at `start`.

        Args:
            is_last: the slot is its own. One that computes what comes before draws nothing.
        """
        head_pages = self.head_pages if is_last else ()
        root = self.token_ids[start]
        return SlotSequence(start + 1, root, self.sampling, self.pages, head_pages)


@dataclass(frozen=True, slots=True)
class SequenceRound:
    """The result of a round for one sequence.

    Attributes:
        token_ids: committed, the bonus token last; at least one.
        num_drafted: nodes of its tree.
        logprobs: of each token; empty where none are wanted.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    num_drafted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
