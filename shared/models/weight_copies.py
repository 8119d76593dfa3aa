"""Weights from mapped files to their places, on several threads.

Copying from a mapped file reads it, with a page fault every few pages: one thread brings a few
gigabytes a second, a tenth of what a GPU takes in. A GPU takes in that much from pinned memory
only, so every thread has two pinned buffers: it fills one while the other is on its way.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_THREADS = 8
_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """One tensor to be copied, of any strides.

    Attributes:
        source: in the host's memory.
        place: of the same shape, contiguous; takes the elements in its own dtype.
    """

    source: Tensor
    place: Tensor


def copy_weights(copies: Iterable[WeightCopy], device: torch.device) -> Iterator[int]:
    """Copies everything to places on `device`, and yields the bytes written of each part.

    All is there when the iterator has ended, for whatever the caller queues next.

    Raises:
        Exception: whatever `copies` raises.
    """
    lane = _GpuLane(device) if device.type == "cuda" else _HostLane()
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
            waiting: deque[Future[int]] = deque()
            for part in _parts(copies):
                waiting.append(pool.submit(lane.copy, part))
                if len(waiting) > 2 * num_threads:
                    yield waiting.popleft().result()
            for each in waiting:
                yield each.result()
    finally:
        lane.finish()


def _parts(copies: Iterable[WeightCopy]) -> Iterator[WeightCopy]:
    """Yields the copies cut along their first axis, so that a buffer holds any of them."""
    for copy in copies:
        row_bytes = copy.source[0].nbytes
        num_rows = max(_CHUNK_BYTES // row_bytes, 1)
        sources, places = torch.split(copy.source, num_rows), torch.split(copy.place, num_rows)
        yield from map(WeightCopy, sources, places)


class _HostLane:
    """Copies within the host's memory."""

    def copy(self, part: WeightCopy) -> int:
        """Returns the bytes written."""
        part.place.copy_(part.source)
        return part.place.nbytes

    def finish(self) -> None:
        """Nothing is under way."""


class _Buffer:
    """Pinned memory, and when the copy from it is over."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def filled(self, source: Tensor) -> Tensor:
        """Returns a contiguous pinned copy of `source`, once the buffer is free."""
        self.is_free.synchronize()
        if len(self.memory) < source.nbytes:
            size_bytes = max(source.nbytes, _CHUNK_BYTES)
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        staged = self.memory[: source.nbytes].view(source.dtype).view(source.shape)
        return staged.copy_(source)


class _GpuLane(threading.local):
    """The buffers and the stream of one thread; each thread that uses it gets its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            # The places may be memory that work queued before this still reads.
            self._stream.wait_stream(torch.cuda.default_stream())
            self._buffers = deque((_Buffer(), _Buffer()))

    def copy(self, part: WeightCopy) -> int:
        """Returns the bytes written, which may still be on their way from this thread's buffers."""
        buffer = self._buffers[0]
        self._buffers.rotate()
        with torch.cuda.stream(self._stream):
            part.place.copy_(buffer.filled(part.source), non_blocking=True)
            buffer.is_free.record()
        return part.place.nbytes

    def finish(self) -> None:
        """Waits for everything that any thread has queued."""
        torch.cuda.synchronize(self._device)
