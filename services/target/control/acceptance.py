"""How likely drafted tokens are accepted: by level for each sequence, and by confidence. No torch.

Levels say what a tree not drafted yet would bring; confidences say which nodes of a drafted tree
are worth their rows. Both are learnt from verdicts and forget slowly.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

FIRST_RATE = 0.8
"""Acceptance a level is assumed to have before anything is known: high, so that it is tried."""

OPTIMISM = 0.3
"""Added to the rate of a level that was never tried."""

MAX_LEVELS = 32
LARGEST_WEIGHT = 1e12


@dataclass(slots=True)
class Counts:
    """Trials and hits with exponential forgetting.

    Newer trials weigh more instead of older ones less, so that nothing has to be touched that was
    not tried.

    Attributes:
        memory: share of its weight that a trial keeps from one round to the next, in (0, 1].
    """

    memory: float
    num_slots: int
    _weight: float = 1.0
    _trials: list[float] = field(default_factory=list)
    _hits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._trials = [0.0] * self.num_slots
        self._hits = [0.0] * self.num_slots

    def age(self) -> None:
        """A round begins."""
        self._weight /= self.memory
        if self._weight > LARGEST_WEIGHT:
            self._trials = [each / self._weight for each in self._trials]
            self._hits = [each / self._weight for each in self._hits]
            self._weight = 1.0

    def add(self, slot: int, *, is_hit: bool) -> None:
        """Counts a trial."""
        self._trials[slot] += self._weight
        if is_hit:
            self._hits[slot] += self._weight

    def num_trials(self, slot: int) -> float:
        """Returns the trials that are remembered."""
        return self._trials[slot] / self._weight

    def rate(self, slot: int, prior: float, strength: float) -> float:
        """Returns the share of hits, with `strength` imagined trials of rate `prior`."""
        imagined = strength * self._weight
        return (self._hits[slot] + imagined * prior) / (self._trials[slot] + imagined)


@dataclass(slots=True)
class LevelRates:
    """Acceptance level by level: how often level d is accepted where level d − 1 was.

    Attributes:
        strength: trials that the prior is worth.
    """

    counts: Counts
    strength: float

    @classmethod
    def of(cls, *, memory: float, strength: float) -> LevelRates:
        """Returns rates without any trials."""
        return cls(Counts(memory, MAX_LEVELS), strength)

    def observe(self, num_accepted: int, num_levels: int) -> None:
        """Counts a round.

        Args:
            num_levels: levels that could have been accepted; a tree that is shallower than what
                was asked for counts as asked, because the draft had nothing better.
        """
        self.counts.age()
        for level in range(min(num_accepted + 1, num_levels, MAX_LEVELS)):
            self.counts.add(level, is_hit=level < num_accepted)

    def rates(self, num_levels: int, prior: Sequence[float] = ()) -> list[float]:
        """Returns the rate of each level.

        Args:
            prior: rates of the population; without them a level never tried is assumed as good as
                the one before it, and the first one to have `FIRST_RATE`.
        """
        rates: list[float] = []
        last = FIRST_RATE
        for level in range(min(num_levels, MAX_LEVELS)):
            last = self.counts.rate(level, prior[level] if prior else last, self.strength)
            rates.append(last)
        return rates

    def hopeful_rates(self, num_levels: int) -> list[float]:
        """Returns rates that are higher the less a level was tried, so that a deeper tree is tried
        again now and then; never above that of the level before."""
        rates = self.rates(num_levels)
        for level in range(1, len(rates)):
            hoped = rates[level] + _hope(self.counts.num_trials(level))
            rates[level] = max(rates[level], min(hoped, rates[level - 1]))
        return rates


def _hope(num_trials: float) -> float:
    return OPTIMISM / math.sqrt(1.0 + num_trials)


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Returns the tokens a round is expected to commit with 0, 1, … levels, bonus included."""
    total, survival = 1.0, 1.0
    tokens = [total]
    for rate in rates:
        survival *= rate
        total += survival
        tokens.append(total)
    return tokens


_EDGES = tuple(map(math.log, (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)))
_CENTRES = (0.01, 0.035, 0.075, 0.15, 0.27, 0.42, 0.57, 0.72, 0.85, 0.94, 0.99)
CONFIDENCE_STRENGTH = 4.0


class Confidences:
    """What a draft's own probabilities mean: the share of nodes accepted, by stated probability,
    of those whose parent was."""

    def __init__(self, memory: float) -> None:
        self._counts = Counts(memory, len(_CENTRES))

    def observe(self, tried: Iterable[tuple[float, bool]]) -> None:
        """Counts a round: log probability and verdict of each node whose parent was accepted."""
        self._counts.age()
        for log_prob, is_hit in tried:
            self._counts.add(_bin(log_prob), is_hit=is_hit)

    def __call__(self, log_prob: float) -> float:
        """Returns the probability that a node is accepted where its parent is."""
        slot = _bin(log_prob)
        return self._counts.rate(slot, _CENTRES[slot], CONFIDENCE_STRENGTH)


def _bin(log_prob: float) -> int:
    return bisect.bisect_right(_EDGES, log_prob)
