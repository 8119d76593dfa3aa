"""Prepares n-gram trees for the verdicts to come: a look-up each, no forward. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.draft.drafters.drafter import Proposal
from services.draft.fan_out import FanOut
from services.draft.rank_shares import RankShares
from services.draft.sequence import DraftSequence, SequenceKey
from shared.ngram.index import Cursor, NgramIndex
from shared.tokens import Condition, TokenTree, TreeShape

_CHOICES = TreeShape(num_steps=1, topk=16, num_draft_tokens=17)
"""What may follow a node: trees of one level."""
_UNLIKELY = -3.0


@dataclass(frozen=True, slots=True)
class _Flying:
    sequence: DraftSequence
    tree: TokenTree
    shape: TreeShape
    fan_out: FanOut


@dataclass(frozen=True, slots=True, order=True)
class _Outcome:
    """A verdict, likeliest first.

    Attributes:
        cost: negated log probability.
        position: place of the node, 0 for the last committed token; breaks ties with `rank`.
    """

    cost: float
    position: int
    rank: int
    token: int


class NgramForesight:
    """See `Foresight`.

    Args:
        current: returns a sequence's cursor with every committed token taken in.
    """

    def __init__(self, index: NgramIndex, current: Callable[[DraftSequence], Cursor]) -> None:
        self.budget = 0
        self._index = index
        self._current = current
        self._shares = RankShares()
        self._flying: dict[SequenceKey, _Flying] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._flying)

    def begin(
        self, sequence: DraftSequence, tree: TokenTree, shape: TreeShape, fan_out: FanOut
    ) -> None:
        self._flying[sequence.key] = _Flying(sequence, tree, shape, fan_out)

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """A new tree costs no more than an old one."""
        return False

    def drop(self, sequence: DraftSequence) -> None:
        """Forgets a sequence: a verdict fell, or it ended."""
        self._flying.pop(sequence.key, None)

    def advance(self) -> list[Proposal]:
        """Prepares for one sequence's verdicts."""
        if not self._flying:
            return []
        return list(self._prepare(self._flying.pop(next(iter(self._flying)))))

    def observe(self, cursor: Cursor, token_ids: Sequence[int]) -> None:
        """Learns which of its choices the target took.

        Args:
            cursor: of the text before the verdict.
            token_ids: what the verdict commits.
        """
        for token in token_ids:
            choices = self._choices(cursor)
            if not choices.token_ids or not self._index.is_current(cursor):
                return
            self._shares.observe(_rank(choices, token))
            cursor = self._index.supposed(cursor, token)

    def _prepare(self, flying: _Flying) -> Iterator[Proposal]:
        cursors = [self._current(flying.sequence)]
        for parent, token in zip(flying.tree.parent_indices, flying.tree.token_ids, strict=True):
            above = cursors[0 if parent is None else parent + 1]
            cursors.append(self._index.supposed(above, token))
        outcomes = self._outcomes(flying, cursors)
        for each in heapq.nsmallest(flying.fan_out.budget, outcomes):
            cursor = self._index.supposed(cursors[each.position], each.token)
            tree = self._index.grow_ahead(cursor, flying.shape)
            node = each.position - 1 if each.position else None
            yield Proposal(flying.sequence, tree, Condition(node, each.token))

    def _outcomes(self, flying: _Flying, cursors: Sequence[Cursor]) -> Iterator[_Outcome]:
        """Yields every verdict that ends in a token the tree does not hold.

        Args:
            cursors: of the last committed token, then of each node.
        """
        tree = flying.tree
        costs, choices = [0.0], [self._choices(cursor) for cursor in cursors]
        held: list[set[int]] = [set() for _ in cursors]
        for token, parent in zip(tree.token_ids, tree.parent_indices, strict=True):
            above = 0 if parent is None else parent + 1
            held[above].add(token)
            costs.append(costs[above] + self._cost(choices[above], token))
        depths = (0, *tree.depths)
        for position, own in enumerate(choices):
            before = costs[position] - flying.fan_out.log_weight(depths[position])
            for rank, token in enumerate(own.token_ids):
                if token not in held[position]:
                    yield _Outcome(before + self._cost(own, token), position, rank, token)

    def _choices(self, cursor: Cursor) -> TokenTree:
        return self._index.grow_ahead(cursor, _CHOICES)

    def _cost(self, choices: TokenTree, token: int) -> float:
        rank = _rank(choices, token)
        if rank is None:
            # A shorter context proposed it: not among the choices, but likely enough to be drafted.
            return -self._shares.log_prob(len(choices), _UNLIKELY)
        return -self._shares.log_prob(rank, choices.log_probs[rank])


def _rank(choices: TokenTree, token: int) -> int | None:
    return choices.token_ids.index(token) if token in choices.token_ids else None
