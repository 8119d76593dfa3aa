"""Prepares n-gram trees for the verdicts to come: a look-up each, no forward. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.draft.drafters.drafter import Proposal
from services.draft.fan_out import FanOut
from services.draft.likely_verdicts import Continuation, likely_verdicts, rank_of
from services.draft.rank_shares import RankShares
from services.draft.sequence import DraftSequence, SequenceKey
from shared.ngram.index import Cursor, NgramIndex
from shared.tokens import TokenTree, TreeShape

_CHOICES = TreeShape(num_steps=1, topk=16, num_draft_tokens=17)
"""The candidates after a node: trees of one level."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    sequence: DraftSequence
    tree: TokenTree
    shape: TreeShape
    fan_out: FanOut


class NgramLookahead:
    """See `Lookahead`.

    Args:
        current: returns a sequence's cursor with every committed token taken in.
    """

    def __init__(self, index: NgramIndex, current: Callable[[DraftSequence], Cursor]) -> None:
        self.budget = 0
        self._index = index
        self._current = current
        self._shares = RankShares()
        self._in_flight: dict[SequenceKey, _InFlight] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight)

    def begin(
        self, sequence: DraftSequence, tree: TokenTree, shape: TreeShape, fan_out: FanOut
    ) -> None:
        self._in_flight[sequence.key] = _InFlight(sequence, tree, shape, fan_out)

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """A new tree costs no more than an old one."""
        return False

    def drop(self, sequence: DraftSequence) -> None:
        """Forgets a sequence: a verdict fell, or it ended."""
        self._in_flight.pop(sequence.key, None)

    def advance(self) -> list[Proposal]:
        """Prepares for one sequence's verdicts."""
        if not self._in_flight:
            return []
        return list(self._prepare(self._in_flight.pop(next(iter(self._in_flight)))))

    def observe(self, cursor: Cursor, token_ids: Sequence[int]) -> None:
        """Learns which of its choices the target took.

        Args:
            cursor: of the text before the verdict.
            token_ids: what the verdict commits.
        """
        for token in token_ids:
            choices = self._choices(cursor)
            if not choices or not self._index.is_current(cursor):
                return
            self._shares.observe(rank_of(choices, token))
            cursor = self._index.supposed(cursor, token)

    def _prepare(self, in_flight: _InFlight) -> Iterator[Proposal]:
        cursors = [self._current(in_flight.sequence)]
        for parent, token in zip(
            in_flight.tree.parent_indices, in_flight.tree.token_ids, strict=True
        ):
            above = cursors[0 if parent is None else parent + 1]
            cursors.append(self._index.supposed(above, token))
        choices = [self._choices(cursor) for cursor in cursors]
        for each in likely_verdicts(in_flight.tree, choices, self._shares, in_flight.fan_out):
            cursor = self._index.supposed(cursors[each.place], each.token)
            tree = self._index.grow_ahead(cursor, in_flight.shape)
            yield Proposal(in_flight.sequence, tree, each.condition)

    def _choices(self, cursor: Cursor) -> list[Continuation]:
        tree = self._index.grow_ahead(cursor, _CHOICES)
        return list(zip(tree.token_ids, tree.log_probs, strict=True))
