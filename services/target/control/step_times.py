"""How long a decode step takes, by the rows of its forward: measured, not assumed. No torch.

Steps with prompt chunks are left out. Between measured widths the time is interpolated, and never
lets more rows cost less. Outside them it is taken for about as short as it can be, which makes an
untried width be tried and so measured; a width counts as measured after a few steps, because the
first ones of a width are often cold.

What else the machine does slows all widths alike, so their times are kept relative to a *pace*
that follows quickly, and stay comparable although they were measured at different moments.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from services.target.control.averages import Average, Typical

PACE_SMOOTHING = 0.25
PACE_WINDOW = 5
PACE_LEAK = 0.01
"""Share of its way back to 1 that the pace goes with each step. It bounds drift, and makes widths
that were last measured in a slow time be tried again."""

LARGEST_LOG_PACE_STEP = math.log(2.0)
NUM_EXACT_ROWS = 8
"""Widths up to here have a bucket each; above, four buckets an octave."""


@dataclass(slots=True)
class _Bucket:
    """Steps of about one width.

    Attributes:
        quiet: their times, while no draft computed.
        busy: while one did.
    """

    rows: Average = field(default_factory=Average)
    quiet: Typical = field(default_factory=Typical)
    busy: Typical = field(default_factory=Typical)
    seen_at: int = 0

    @property
    def is_sure(self) -> bool:
        return self.quiet.is_sure or self.busy.is_sure


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
        self._slowdown = Average()
        self._log_ratios: deque[float] = deque(maxlen=PACE_WINDOW)

    @property
    def slowdown(self) -> float:
        """How much longer a step takes while a draft computes, at least 1."""
        return max(self._slowdown.value, 1.0) if self._slowdown.num_samples else 1.0

    def observe(self, num_rows: int, duration_s: float, *, is_quiet: bool = True) -> None:
        """Takes in a step that computed no prompt chunk.

        Args:
            is_quiet: no draft computed meanwhile, perhaps on the same device.
        """
        bucket = self._buckets.setdefault(_bucket_of(num_rows), _Bucket())
        if is_quiet:
            self._follow_pace(bucket, duration_s)
            bucket.quiet.add(duration_s / self.pace)
        elif bucket.quiet.is_sure:
            self._slowdown.add(duration_s / self.pace / bucket.quiet.value)
        else:
            bucket.busy.add(duration_s / self.pace)
        bucket.rows.add(float(num_rows))
        self._num_steps += 1
        bucket.seen_at = self._num_steps
        self._curve = None

    def _follow_pace(self, bucket: _Bucket, duration_s: float) -> None:
        if not bucket.quiet.is_steady or duration_s <= 0:
            return
        log_ratio = math.log(duration_s / (bucket.quiet.value * self.pace))
        self._log_ratios.append(min(max(log_ratio, -LARGEST_LOG_PACE_STEP), LARGEST_LOG_PACE_STEP))
        # The middle one of several: a stall says nothing of the pace.
        self.pace *= math.exp(PACE_SMOOTHING * median(self._log_ratios))
        self.pace += PACE_LEAK * (1.0 - self.pace)

    def age(self, num_rows: int) -> int:
        """Returns how many steps ago one of about this width was seen; all of them if none was."""
        bucket = self._buckets.get(_bucket_of(num_rows))
        return self._num_steps - (0 if bucket is None else bucket.seen_at)

    @property
    def are_sure(self) -> bool:
        """Whether any width was measured often enough for cold steps not to count."""
        return any(bucket.is_sure for bucket in self._buckets.values())

    def is_sure(self, num_rows: int) -> bool:
        """Whether steps of about this width were."""
        bucket = self._buckets.get(_bucket_of(num_rows))
        return bucket is not None and bucket.is_sure

    def __call__(self, num_rows: int) -> float:
        """Returns the expected seconds; 0 before anything was measured."""
        return self.pace * self.at_usual_pace(num_rows)

    def at_usual_pace(self, num_rows: int) -> float:
        """Returns the seconds that are expected if nothing else happens on the machine."""
        rows, times_s = self._fitted()
        if not rows:
            return 0.0
        place = bisect.bisect_left(rows, num_rows)
        if place == 0:
            return times_s[0] * num_rows / rows[0]
        if place == len(rows):
            return times_s[-1] + _half_slope(rows, times_s) * (num_rows - rows[-1])
        left, right = rows[place - 1], rows[place]
        share = (num_rows - left) / (right - left)
        return times_s[place - 1] + share * (times_s[place] - times_s[place - 1])

    def measured(self) -> dict[int, float]:
        """Returns the typical seconds of each measured width, by rows."""
        return {
            round(bucket.rows.value): self.pace * self._value_s(bucket)
            for _, bucket in sorted(self._buckets.items())
        }

    def _value_s(self, bucket: _Bucket) -> float:
        if bucket.quiet.is_sure or not bucket.busy.num_samples:
            return bucket.quiet.value
        # Steps beside a draft tell what one without would take, if nothing better is known.
        return bucket.busy.value / self.slowdown

    def _fitted(self) -> tuple[list[float], list[float]]:
        if self._curve is None:
            buckets = _sure([bucket for _, bucket in sorted(self._buckets.items())])
            rows = [bucket.rows.value for bucket in buckets]
            times_s = [self._value_s(bucket) for bucket in buckets]
            weights = [bucket.quiet.num_samples or 1 for bucket in buckets]
            self._curve = rows, non_decreasing(times_s, weights)
        return self._curve


def _sure(buckets: Iterable[_Bucket]) -> list[_Bucket]:
    """Returns the widths that are measured well enough, or all where none is."""
    known = list(buckets)
    return [bucket for bucket in known if bucket.is_sure] or known


def _half_slope(rows: list[float], times_s: list[float]) -> float:
    """Returns the seconds a row beyond the widest takes at least: half of what the last did."""
    if len(rows) < 2:
        return 0.0
    return 0.5 * (times_s[-1] - times_s[-2]) / (rows[-1] - rows[-2])


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
