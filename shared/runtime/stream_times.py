"""Start and end times of work queued on a device, by the host's monotonic clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

OnSpan = Callable[[str, float, float], None]
"""Receives the name of a span, and the seconds at which it began and ended."""
_SYNC_INTERVAL_S = 0.5
"""Clocks of host and device drift apart by some microseconds in that time."""


@dataclass(frozen=True, slots=True)
class _Span:
    """A span that the GPU may not have finished.

    Attributes:
        zero: an event before the others, at the host's time `zero_s`.
    """

    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event
    zero: torch.cuda.Event
    zero_s: float


class StreamTimes:
    """Times the work queued within `span` on the current stream. For one thread.

    Args:
        on_span: called with each span, some time after the device has finished it.
    """

    def __init__(self, device: torch.device, on_span: OnSpan) -> None:
        self._on_span = on_span
        self._is_cuda = device.type == "cuda"
        self._pending: deque[_Span] = deque()
        self._zero_s = -_SYNC_INTERVAL_S
        if self._is_cuda:
            # Nothing else is queued on this stream, so an event passes at once.
            self._idle = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times the work that the body queues."""
        if not self._is_cuda:
            start_s = time.monotonic()
            yield
            self._on_span(name, start_s, time.monotonic())
            return
        self._report()
        self._sync_clocks()
        start, end = _event(), _event()
        start.record()
        yield
        end.record()
        self._pending.append(_Span(name, start, end, self._zero, self._zero_s))

    def _report(self) -> None:
        while self._pending and self._pending[0].end.query():  # type: ignore[no-untyped-call]
            span = self._pending.popleft()
            start_s, end_s = (
                span.zero_s + 1e-3 * span.zero.elapsed_time(event)
                for event in (span.start, span.end)
            )
            self._on_span(span.name, start_s, end_s)

    def _sync_clocks(self) -> None:
        """Takes the device's time now and then, without waiting for work on other streams."""
        if time.monotonic() - self._zero_s >= _SYNC_INTERVAL_S:
            self._zero = _event()
            self._zero.record(self._idle)
            self._zero.synchronize()
            self._zero_s = time.monotonic()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
