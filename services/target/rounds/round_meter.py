"""Times rounds on the device by when their results are read; waits for nothing. No torch."""

from __future__ import annotations

from services.target.control.round_times import RoundSize, RoundTimes
from shared.tokens import TreeShape


class RoundMeter:
    """Follows runs of rounds. Between two results the device computes one round, since the next
    one is launched before the last is read; before the first it also catches up."""

    def __init__(self, times: RoundTimes) -> None:
        self._times = times
        self._entered_s: float | None = None
        self._last_s: float | None = None

    def enter(self, now_s: float) -> None:
        """The first round of a run is about to be launched."""
        self._entered_s, self._last_s = now_s, None

    def read(self, shape: TreeShape, size: RoundSize, now_s: float) -> None:
        """A result was read."""
        if self._last_s is not None:
            self._times.observe(shape, size, now_s - self._last_s)
        elif self._entered_s is not None:
            self._times.observe_entry(shape, size, now_s - self._entered_s)
        self._last_s = now_s

    def interrupt(self) -> None:
        """What comes next is not the round after: the run has ended, or something was done that
        other rounds do not do, such as capturing graphs."""
        self._entered_s = self._last_s = None
