"""The wire's totals as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.telemetry.wire_meter import WireMeter


class WireMetrics(Collector):
    """`<prefix>_wire_bytes` and `<prefix>_wire_messages` by `direction`: sent, received."""

    def __init__(self, prefix: str, meter: WireMeter) -> None:
        self._prefix = prefix
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        size = CounterMetricFamily(
            f"{self._prefix}_wire_bytes", "Bytes of Speculate streams", labels=("direction",)
        )
        count = CounterMetricFamily(
            f"{self._prefix}_wire_messages", "Messages of Speculate streams", labels=("direction",)
        )
        for direction, totals in (("sent", self._meter.sent), ("received", self._meter.received)):
            size.add_metric((direction,), totals.num_bytes)
            count.add_metric((direction,), totals.num_messages)
        yield from (size, count)
