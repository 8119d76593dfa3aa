"""Counts messages and bytes of the streams between drafts and targets, in both processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.telemetry.start_up import RoundLog


@dataclass(slots=True)
class WireTotals:
    """Totals of one direction of all streams. Written by the event loop, read by any thread."""

    num_messages: int = 0
    num_bytes: int = 0


class WireMeter:
    """Totals of one process.

    Attributes:
        sent, received: totals since start-up, without handshakes.
    """

    def __init__(self, log: RoundLog | None = None) -> None:
        self.sent = WireTotals()
        self.received = WireTotals()
        self._log = log

    def stream(self, attachment_id: str) -> StreamMeter:
        return StreamMeter(self, attachment_id, self._log)


class StreamMeter:
    """Counts one stream. Its messages are numbered, so that the logs of both processes can be
    matched; a stream keeps its order. `kind` is a message's name in the contract."""

    def __init__(self, meter: WireMeter, attachment_id: str, log: RoundLog | None) -> None:
        self._attachment_id, self._log = attachment_id, log
        self.sent = partial(self._count, "sent", meter.sent, itertools.count())
        self.received = partial(self._count, "received", meter.received, itertools.count())

    def _count(
        self, name: str, totals: WireTotals, numbers: Iterator[int], num_bytes: int, kind: str
    ) -> None:
        number = next(numbers)
        totals.num_messages += 1
        totals.num_bytes += num_bytes
        if self._log is not None:
            self._log.instant(
                name, stream=self._attachment_id, number=number, bytes=num_bytes, kind=kind
            )


class WireMetrics(Collector):
    """`<prefix>_wire_bytes` and `<prefix>_wire_messages` by `direction`: sent, received."""

    def __init__(self, prefix: str, meter: WireMeter) -> None:
        self._prefix = prefix
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        size, count = (
            CounterMetricFamily(
                f"{self._prefix}_wire_{what}",
                f"{what.capitalize()} of Speculate streams",
                labels=("direction",),
            )
            for what in ("bytes", "messages")
        )
        for direction, totals in (("sent", self._meter.sent), ("received", self._meter.received)):
            size.add_metric((direction,), totals.num_bytes)
            count.add_metric((direction,), totals.num_messages)
        yield from (size, count)
