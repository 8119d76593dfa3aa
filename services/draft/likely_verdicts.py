"""The verdicts that a tree is likely to end in. No torch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.rank_prior import MEASURED_WEIGHT, MEMORY_TOKENS, PRIOR_SHARE, PRIOR_TOKENS
from shared.tokens import Condition, TokenTree

# Chooses the verdicts that a draft prepares for. No torch.

MAX_BUDGET = 64


MOST_OUTCOMES = 256
"""Verdicts prepared for, those of all sequences together, but one of each: a draft's rows are not
free beyond a few hundred."""


def shared_budget(budget: int, num_sequences: int) -> int:
    """Returns the verdicts of each of that many sequences that are prepared for, where `budget` are
    asked for."""
    return min(budget, max(MOST_OUTCOMES // num_sequences, 1))


NUM_RANKS = 32


class RankShares:
    """Frequencies over the ranks of the draft's choices, over all sequences of a worker.

    A draft's confidence says which of its choices are sure; what the target did before says how far
    to believe it. A weak draft is often too sure of itself, and one whose target is its like is not
    sure enough. Half of a step's probability comes from each.
    """

    def __init__(self) -> None:
        self._counts = [PRIOR_TOKENS * PRIOR_SHARE ** (rank + 1) for rank in range(NUM_RANKS)]
        self._total = PRIOR_TOKENS

    def observe(self, rank: int | None) -> None:
        """Counts one token of the target; None is beyond the choices that were looked at."""
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
"""A token and the log probability that the target takes it, given that it gets there."""
_UNLIKELY = -3.0


@dataclass(frozen=True, slots=True, order=True)
class LikelyVerdict:
    """A verdict, likeliest first.

    Attributes:
        cost: negated log probability.
        place: of the last accepted node, 0 for the last committed token, else the node's index
            plus 1; breaks ties with `rank`.
        rank: of the bonus token among what may follow there.
        token: the bonus token.
    """

    cost: float
    place: int
    rank: int
    token: int

    @property
    def condition(self) -> Condition:
        """The verdict as a condition that names no candidate yet."""
        return Condition(self.place - 1 if self.place else None, self.token)


def likely_verdicts(
    tree: TokenTree,
    continuations: Sequence[Sequence[Continuation]],
    shares: RankShares,
    budget: int,
) -> list[LikelyVerdict]:
    """Returns the likeliest verdicts that end in a token the tree does not hold, at most `budget`.

    A verdict's probability is that of the path to its node times that of the bonus token after it,
    see `RankShares`. So their number falls off geometrically along a path, and the end of a likely
    one gets more than the node before it: what is likeliest to follow there is in no tree yet.

    Args:
        continuations: what may follow the last committed token, then each node, best first; where
            there are none, no verdict is prepared for.
    """
    # Bare tuples are compared several times as fast.
    best = heapq.nsmallest(budget, _verdicts(tree, continuations, shares))
    return [LikelyVerdict(*each) for each in best]


def _verdicts(
    tree: TokenTree,
    continuations: Sequence[Sequence[Continuation]],
    shares: RankShares,
) -> Iterator[tuple[float, int, int, int]]:
    """Yields the fields of each verdict."""
    costs = [0.0]
    held: list[set[int]] = [set() for _ in continuations]
    for token, parent in zip(tree.token_ids, tree.parent_indices, strict=True):
        above = 0 if parent is None else parent + 1
        held[above].add(token)
        costs.append(costs[above] + _cost(continuations[above], token, shares))
    for place, (before, own) in enumerate(zip(costs, continuations, strict=True)):
        for rank, (token, log_prob) in enumerate(own):
            if token not in held[place] and log_prob > -math.inf:
                cost = before - shares.log_prob(rank, log_prob)
                yield cost, place, rank, token


def rank_of(continuations: Sequence[Continuation], token: int) -> int | None:
    """Returns a token's place among the continuations; None when it is none."""
    return next((rank for rank, (each, _) in enumerate(continuations) if each == token), None)


def _cost(continuations: Sequence[Continuation], token: int, shares: RankShares) -> float:
    rank = rank_of(continuations, token)
    if rank is None:
        # Something else proposed it: not among the best, but likely enough to be drafted.
        return -shares.log_prob(len(continuations), _UNLIKELY)
    return -shares.log_prob(rank, continuations[rank][1])
