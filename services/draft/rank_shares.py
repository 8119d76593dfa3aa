"""The share of verdicts that took the draft's first, second, … choice. No torch.

A draft's confidence says which of its choices are sure; what the target did before says how far
to believe it. A weak draft is often too sure of itself, and one whose target is its like is not
sure enough. Half of a step's probability comes from each.
"""

from __future__ import annotations

import math

NUM_RANKS = 32
PRIOR_STEPS = 8.0
"""Weight of the prior in verified tokens: enough for a start, soon outweighed."""
PRIOR_SHARE = 0.5
"""Share of each choice in what the ones before it leave: a geometric fan-out."""
MEASURED_WEIGHT = 0.5
MEMORY_STEPS = 4096.0
"""Older tokens count for less, because texts change."""


class RankShares:
    """Frequencies over the ranks of the draft's choices, over all sequences of a worker."""

    def __init__(self) -> None:
        self._counts = [PRIOR_STEPS * PRIOR_SHARE ** (rank + 1) for rank in range(NUM_RANKS)]
        self._total = PRIOR_STEPS

    def observe(self, rank: int | None) -> None:
        """Counts one token of the target; None is beyond the choices that were looked at."""
        if self._total >= MEMORY_STEPS:
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
