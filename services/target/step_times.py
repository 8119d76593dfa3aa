"""How long a decode step takes, by the rows of its forward: measured, not assumed. No torch.

Steps with prompt chunks are left out. Between measured widths the time is interpolated, and never
lets more rows cost less. Outside them it is taken for as short as it can be, flat above and in
proportion below, which makes an untried width be tried and so measured.

What else the machine does slows all widths alike, so their times are kept relative to a *pace*
that follows quickly, and stay comparable although they were measured at different moments.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from services.target.averages import NUM_FIRST, Average, Duration

PACE_SMOOTHING = 0.25
LARGEST_PACE_STEP = 2.0
"""A step moves the pace as if it had taken at most this many times what was expected, or its
inverse."""

NUM_EXACT_ROWS = 8
"""Widths up to here have a bucket each; above, four buckets an octave."""


@dataclass(slots=True)
class _Bucket:
    rows: Average = field(default_factory=Average)
    time: Duration = field(default_factory=Duration)
    seen_at: int = 0


class StepTimes:
    """Estimates the time of a step from its rows.

    Attributes:
        pace: how much longer everything takes now than when the times were learnt.
    """

    def __init__(self) -> None:
        self.pace = 1.0
        self._num_steps = 0
        self._buckets: dict[int, _Bucket] = {}
        self._curve: tuple[list[float], list[float]] | None = None

    def observe(self, num_rows: int, duration_s: float) -> None:
        """Takes in a step that computed no prompt chunk."""
        bucket = self._buckets.setdefault(_bucket_of(num_rows), _Bucket())
        if bucket.time.num_samples >= NUM_FIRST and bucket.time.value_s > 0:
            ratio = duration_s / (bucket.time.value_s * self.pace)
            ratio = min(max(ratio, 1 / LARGEST_PACE_STEP), LARGEST_PACE_STEP)
            self.pace *= 1 + PACE_SMOOTHING * (ratio - 1)
        bucket.rows.add(float(num_rows))
        bucket.time.add(duration_s / self.pace)
        self._num_steps += 1
        bucket.seen_at = self._num_steps
        self._curve = None

    def age(self, num_rows: int) -> int:
        """Returns how many steps ago one of about this width was seen; all of them if none was."""
        bucket = self._buckets.get(_bucket_of(num_rows))
        return self._num_steps - (0 if bucket is None else bucket.seen_at)

    def __call__(self, num_rows: int) -> float:
        """Returns the expected seconds; 0 before anything was measured."""
        return self.pace * self._relative(num_rows)

    def _relative(self, num_rows: int) -> float:
        rows, times_s = self._fitted()
        if not rows:
            return 0.0
        place = bisect.bisect_left(rows, num_rows)
        if place == 0:
            return times_s[0] * num_rows / rows[0]
        if place == len(rows):
            return times_s[-1]
        left, right = rows[place - 1], rows[place]
        share = (num_rows - left) / (right - left)
        return times_s[place - 1] + share * (times_s[place] - times_s[place - 1])

    def measured(self) -> dict[int, float]:
        """Returns the average seconds of each measured width, by rows."""
        return {
            round(bucket.rows.value): self.pace * bucket.time.value_s
            for _, bucket in sorted(self._buckets.items())
        }

    def _fitted(self) -> tuple[list[float], list[float]]:
        if self._curve is None:
            buckets = [bucket for _, bucket in sorted(self._buckets.items())]
            rows = [bucket.rows.value for bucket in buckets]
            times_s = [bucket.time.value_s for bucket in buckets]
            weights = [min(bucket.time.num_samples, 10) for bucket in buckets]
            self._curve = rows, non_decreasing(times_s, weights)
        return self._curve


def non_decreasing(values: list[float], weights: list[int]) -> list[float]:
    """Returns the closest non-decreasing values in weighted least squares.

    Source: pool adjacent violators; Barlow et al., Statistical Inference under Order Restrictions,
    1972.
    """
    pools: list[tuple[float, int, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            other, other_weight, other_count = pools.pop()
            total = weight + other_weight
            value = (value * weight + other * other_weight) / total
            weight, count = total, count + other_count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


def _bucket_of(num_rows: int) -> int:
    if num_rows <= NUM_EXACT_ROWS:
        return num_rows
    octave = num_rows.bit_length() - 1
    return NUM_EXACT_ROWS + 4 * octave + ((num_rows - (1 << octave)) * 4 >> octave)
