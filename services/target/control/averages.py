"""Running averages that follow a changing quantity. No torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SMOOTHING = 0.1
"""Weight of a new sample once there are enough."""

OUTLIER = 4.0
"""A sample counts as at most this many times the average, so that one stall moves it a little."""

NUM_FIRST = 3
NUM_STEADY = 6
WINDOW = 9


@dataclass(slots=True)
class Average:
    """An exponential average; the plain mean of the first samples.

    Attributes:
        value: meaningless before the first sample.
    """

    value: float = 0.0
    num_samples: int = 0

    def add(self, sample: float) -> None:
        """Takes a sample in."""
        if self.num_samples >= NUM_FIRST:
            sample = min(sample, OUTLIER * self.value)
        self.num_samples += 1
        self.value += max(1.0 / self.num_samples, SMOOTHING) * (sample - self.value)


@dataclass(slots=True)
class Typical:
    """What a duration is when nothing disturbs it: the middle one of its last samples, or of the
    lower ones while there are few.

    First samples hold allocation, compilation and cold caches, later ones what else the machine
    does. Both only ever add, so a mean would keep them for many samples, and one of few samples
    would keep a choice from being made again that has been tried once, cold.
    """

    _samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _value: float | None = None

    def add(self, sample: float) -> None:
        """Takes a sample in."""
        self._samples.append(sample)
        self._value = None

    @property
    def num_samples(self) -> int:
        """Samples that are remembered."""
        return len(self._samples)

    @property
    def is_sure(self) -> bool:
        """Whether there are enough for one or two to be disregarded."""
        return len(self._samples) >= NUM_FIRST

    @property
    def is_steady(self) -> bool:
        """Whether there are enough for the first ones not to matter."""
        return len(self._samples) >= NUM_STEADY

    @property
    def value(self) -> float:
        """The typical sample; 0 before the first."""
        if self._value is None:
            ordered = sorted(self._samples)
            place = (len(ordered) - 1) // (2 if self.is_steady else 3)
            self._value = ordered[place] if ordered else 0.0
        return self._value
