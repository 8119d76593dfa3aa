"""Times at which the weights of a target and of its drafts were replaced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from shared.weight_change import WeightChange

MOST = 64
"""Changes that are kept, the latest."""


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
