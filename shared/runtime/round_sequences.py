"""Sequences on their way into rounds on the device, and what rounds did to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.runtime.round_state import SlotSequence
from shared.tokens import SamplingParams


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A sequence that is to take part.

    Attributes:
        token_ids: committed, at least two; all but the last are computed by the target, and their
            features are in `feature_rows`.
        pages: the target's, in logical order.
        head_pages: the head's; cover one row a token but the last.
        num_head_rows: the first rows, whose keys and values are in `head_pages` already.
    """

    sequence_id: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    pages: Sequence[int]
    head_pages: Sequence[int]
    num_head_rows: int

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
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    num_drafted: int
