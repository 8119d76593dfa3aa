"""Times at which the weights of a target and of its drafts were replaced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MOST = 64
"""Changes that are kept, the latest."""


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Other weights came into force.

    Attributes:
        time_s: seconds since the epoch.
        algorithm: of the draft that has them; empty for the target.
    """

    time_s: float
    algorithm: str
    version: str


class WeightChanges:
    """Written by any thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._latest = deque[WeightChange](maxlen=MOST)

    def note(self, algorithm: str, version: str) -> None:
        """Weights are in force from now on."""
        self._latest.append(WeightChange(self._clock(), algorithm, version))

    def latest(self) -> tuple[WeightChange, ...]:
        """Returns changes, oldest first."""
        return tuple(self._latest)
