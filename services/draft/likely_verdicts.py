"""The likeliest verdicts on a tree, for which a draft prepares. No torch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.sampling_defaults import MEASURED_WEIGHT, MEMORY_TOKENS, PRIOR_SHARE, PRIOR_TOKENS
from shared.tokens import Condition, TokenTree

MAX_BUDGET = 64
"""Largest outcome budget: verdicts per sequence and round."""

MAX_TOTAL_OUTCOMES = 64
"""Most verdicts to prepare for, of all sequences together, though at least one of each. A forward
on a GPU takes more rows in little more time, but each verdict costs time of the draft's host."""


def shared_budget(budget: int, num_sequences: int, *, are_rows_cheap: bool = True) -> int:
    """Returns how many verdicts to prepare for on each of the sequences, at most `budget`.

    Args:
        are_rows_cheap: whether rows add little to a forward. If not, as on a CPU, the sequences
            share the budget of one.
    """
    if not are_rows_cheap:
        return budget // num_sequences
    return min(budget, max(MAX_TOTAL_OUTCOMES // num_sequences, 1))


NUM_RANKS = 32


class RankShares:
    """How often the target takes the draft's choice of each rank, over all sequences of a worker.

    A draft's confidence tells its sure choices from the others; the target's earlier choices tell
    how far to trust it. A weak draft is often overconfident, and a draft much like its target is
    underconfident. Half of the probability of a token comes from each.
    """

    def __init__(self) -> None:
        self._counts = [PRIOR_TOKENS * PRIOR_SHARE ** (rank + 1) for rank in range(NUM_RANKS)]
        self._total = PRIOR_TOKENS

    def observe(self, rank: int | None) -> None:
        """Counts one token of the target; None is a token that was none of the choices."""
        if self._total >= MEMORY_TOKENS:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2
        self._total += 1.0
        if rank is not None and rank < NUM_RANKS:
            self._counts[rank] += 1.0

    def share(self, rank: int) -> float:
        """Returns how often the target takes the choice of that rank, counted from 0."""
        return self._counts[rank] / self._total if rank < NUM_RANKS else 0.0

    def log_prob(self, rank: int, log_prob: float) -> float:
        """Returns the log probability that the target takes a choice.

        Args:
            log_prob: the draft's own estimate.
        """
        own = (1.0 - MEASURED_WEIGHT) * math.exp(log_prob)
        return math.log(max(own + MEASURED_WEIGHT * self.share(rank), 1e-30))


Continuation = tuple[int, float]
"""A token and the log probability that the target takes it, given that it reaches this node."""
_UNLIKELY_LOG_PROB = -3.0


@dataclass(frozen=True, slots=True, order=True)
class LikelyVerdict:
    """A possible verdict; sorts by probability, likeliest first.

    Attributes:
        cost: negated log probability.
        tree_row: row of the last accepted node: its index plus 1, or 0 for the last committed
            token. Breaks ties together with `rank`.
        rank: rank of the bonus token among the continuations of that row.
        token: the bonus token.
    """

    cost: float
    tree_row: int
    rank: int
    token: int

    @property
    def condition(self) -> Condition:
        """The verdict as a condition, which names no candidate yet."""
        return Condition(self.tree_row - 1 if self.tree_row else None, self.token)


def likely_verdicts(
    tree: TokenTree,
    continuations: Sequence[Sequence[Continuation]],
    shares: RankShares,
    budget: int,
) -> list[LikelyVerdict]:
    """Returns the likeliest verdicts whose bonus token the tree does not hold, at most `budget`.

    A verdict's probability is that of the path to its last node times that of the bonus token after
    it, see `RankShares`. So the number of verdicts falls off geometrically along a path. The end of
    a likely path gets more than the node before it: its likeliest continuation is in no tree yet.

    Args:
        continuations: continuations of the last committed token, then of each node, best first. No
            verdict ends after a node without continuations.
    """
    # Bare tuples are compared several times as fast.
    best = heapq.nsmallest(budget, _verdicts(tree, continuations, shares))
    return [LikelyVerdict(*fields) for fields in best]


def _verdicts(
    tree: TokenTree,
    continuations: Sequence[Sequence[Continuation]],
    shares: RankShares,
) -> Iterator[tuple[float, int, int, int]]:
    """Yields the fields of each verdict."""
    path_costs = [0.0]
    child_tokens: list[set[int]] = [set() for _ in continuations]
    for token, parent in zip(tree.token_ids, tree.parent_indices, strict=True):
        parent_row = 0 if parent is None else parent + 1
        child_tokens[parent_row].add(token)
        cost = path_costs[parent_row] + _cost(continuations[parent_row], token, shares)
        path_costs.append(cost)
    for tree_row, (path_cost, choices) in enumerate(zip(path_costs, continuations, strict=True)):
        for rank, (token, log_prob) in enumerate(choices):
            if token not in child_tokens[tree_row] and log_prob > -math.inf:
                cost = path_cost - shares.log_prob(rank, log_prob)
                yield cost, tree_row, rank, token


def rank_of(continuations: Sequence[Continuation], token: int) -> int | None:
    """Returns the rank of a token among the continuations; None when it is none of them."""
    ranks = (rank for rank, (candidate, _) in enumerate(continuations) if candidate == token)
    return next(ranks, None)


def _cost(continuations: Sequence[Continuation], token: int, shares: RankShares) -> float:
    rank = rank_of(continuations, token)
    if rank is None:
        # Another source proposed the token: not among the best, but likely enough to be drafted.
        return -shares.log_prob(len(continuations), _UNLIKELY_LOG_PROB)
    return -shares.log_prob(rank, continuations[rank][1])
