"""History of the tokens committed a round."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gateway.generation import SpeculationStats

INTERVAL_S = 15
NUM_INTERVALS = 120


@dataclass(slots=True)
class Interval:
    """Requests of one model that ended within one interval. Not frozen: each adds to it.

    Attributes:
        number: of the interval since the epoch.
        num_verified_rounds, num_accepted: as in `SpeculationStats`.
    """

    number: int
    num_verified_rounds: int = 0
    num_accepted: int = 0

    @property
    def begin_s(self) -> int:
        """Seconds since the epoch."""
        return self.number * INTERVAL_S


class AcceptanceHistory:
    """The latest half an hour, by model. Owned by the event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._by_model: defaultdict[str, deque[Interval]] = defaultdict(
            partial(deque, maxlen=NUM_INTERVALS)
        )

    def add(self, model: str, stats: SpeculationStats) -> None:
        """Counts a generation that has ended."""
        if not stats.num_verified_rounds:
            return
        number, known = self._now, self._by_model[model]
        if not known or known[-1].number < number:
            known.append(Interval(number))
        known[-1].num_verified_rounds += stats.num_verified_rounds
        known[-1].num_accepted += stats.num_accepted

    def intervals(self, model: str) -> list[Interval]:
        """Returns all `NUM_INTERVALS`, oldest first and with those that nothing ended in, so that
        those of several workers are alike."""
        known = {each.number: each for each in self._by_model.get(model, ())}
        last = self._now
        return [known.get(n) or Interval(n) for n in range(last - NUM_INTERVALS + 1, last + 1)]

    @property
    def _now(self) -> int:
        return int(self._clock()) // INTERVAL_S
