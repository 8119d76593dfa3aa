"""Running averages that follow a changing quantity. No torch."""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.1
"""Weight of a new sample once there are enough."""

OUTLIER = 4.0
"""A sample counts as at most this many times the average, so that one stall moves it a little."""

NUM_FIRST = 3


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
class Duration:
    """An exponential average of a duration whose first sample may hold compilation or a cold
    cache: the first counts only if the second is not shorter."""

    value_s: float = 0.0
    num_samples: int = 0

    def add(self, sample_s: float) -> None:
        """Takes a sample in, in seconds."""
        self.num_samples += 1
        if self.num_samples == 1:
            self.value_s = sample_s
        elif self.num_samples == 2:
            self.value_s = min(self.value_s, sample_s)
        else:
            sample_s = min(sample_s, OUTLIER * self.value_s)
            weight = max(1.0 / (self.num_samples - 1), SMOOTHING)
            self.value_s += weight * (sample_s - self.value_s)
