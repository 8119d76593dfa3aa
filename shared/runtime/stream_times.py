"""When parts of what is queued on a device begin and end, by the host's monotonic clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

OnSpan = Callable[[str, float, float], None]
"""Takes a name, and the seconds at which something began and ended."""
_MOST_APART_S = 0.5
"""The clocks of host and device drift apart by some microseconds in that time."""


@dataclass(frozen=True, slots=True)
class _Span:
    """What a GPU may still have to do.

    Attributes:
        zero: an event of `zero_s`, before the others.
    """

    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event
    zero: torch.cuda.Event
    zero_s: float


class StreamTimes:
    """Times what is queued within `span` on the current stream. For one thread.

    Args:
        on_span: hears of each part once it is done, some time later.
    """

    def __init__(self, device: torch.device, on_span: OnSpan) -> None:
        self._on_span = on_span
        self._is_cuda = device.type == "cuda"
        self._pending: deque[_Span] = deque()
        self._zero_s = -_MOST_APART_S
        if self._is_cuda:
            # Nothing else is queued there, so an event comes at once.
            self._idle = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times a part."""
        if not self._is_cuda:
            start_s = time.monotonic()
            yield
            self._on_span(name, start_s, time.monotonic())
            return
        self._report()
        self._meet()
        start, end = _event(), _event()
        start.record()
        yield
        end.record()
        self._pending.append(_Span(name, start, end, self._zero, self._zero_s))

    def _report(self) -> None:
        while self._pending and self._pending[0].end.query():  # type: ignore[no-untyped-call]
            each = self._pending.popleft()
            start_s, end_s = (
                each.zero_s + 1e-3 * each.zero.elapsed_time(event)
                for event in (each.start, each.end)
            )
            self._on_span(each.name, start_s, end_s)

    def _meet(self) -> None:
        """Finds out what time it is on the device, now and then. Waits for nothing that is queued
        on other streams."""
        if time.monotonic() - self._zero_s >= _MOST_APART_S:
            self._zero = _event()
            self._zero.record(self._idle)
            self._zero.synchronize()
            self._zero_s = time.monotonic()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
