"""A Prometheus histogram filled by one thread, for events more frequent than requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily


class StepHistogram:
    """Counts by bucket. Costs a fifth of the client library's, which takes a lock each time.

    Args:
        bounds: upper bounds, ascending, each inclusive; what is above all goes to `+Inf`.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `count` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds a sample of the state now to a metric family. From any thread."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)
