"""Asynchronous copies between host and device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class PinnedMemory:
    """Pinned host memory for one copy at a time, and an event behind that copy.

    To allocate pinned memory costs the host as much as to queue a copy, so repeated copies keep
    their memory.

    Args:
        size: most elements of a copy.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._elements = torch.empty(size, dtype=dtype, pin_memory=True)
        self._views: dict[tuple[int, ...], Tensor] = {}
        self._event_behind = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def size(self) -> int:
        """Most elements of a copy."""
        return len(self._elements)

    def of(self, shape: tuple[int, ...]) -> Tensor:
        """Returns the first elements as a tensor of `shape`; views are kept, for few shapes."""
        view = self._views.get(shape)
        if view is None:
            view = self._elements[: math.prod(shape)].view(shape)
            self._views[shape] = view
        return view

    def queued(self) -> torch.cuda.Event:
        """Records that a copy was queued on this thread's stream; returns the event behind it."""
        self._event_behind.record()
        return self._event_behind

    def wait(self) -> None:
        """Waits until the last queued copy has run; returns at once if there was none."""
        wait_for(self._event_behind)


class HostCopy:
    """Copies a tensor to the host asynchronously, behind the work queued so far.

    Host tensors are not copied: nothing may write to them before `read`.

    Args:
        memory: receives the copy, and no other copy before `read`; None allocates new memory.
    """

    def __init__(self, source: Tensor, memory: PinnedMemory | None = None) -> None:
        self._host = source
        self._is_done: torch.cuda.Event | None = None
        if source.is_cuda:
            memory = memory or PinnedMemory(source.numel(), source.dtype)
            self._host = memory.of(source.shape)
            self._host.copy_(source, non_blocking=True)
            self._is_done = memory.queued()

    @property
    def is_done(self) -> bool:
        """Whether `read` would not wait."""
        return self._is_done is None or bool(self._is_done.query())  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """Waits for the copy and returns it."""
        if self._is_done is not None:
            wait_for(self._is_done)
        return self._host


class DeviceMark:
    """A mark in the device's work queue, to check whether earlier work is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def put(self) -> None:
        """Sets the mark behind the work queued so far; replaces an earlier mark."""
        if self._event is not None:
            self._event.record()

    @property
    def is_passed(self) -> bool:
        """Whether the device has reached the mark, or no mark is set."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


def wait_for(event: torch.cuda.Event) -> None:
    """Waits for an event. If it has passed already, the thread keeps Python's interpreter lock."""
    if not event.query():  # type: ignore[no-untyped-call]
        event.synchronize()


_NUM_UNDER_WAY = 2
"""Copies in flight of one size before the host waits for the oldest."""
_MIN_SIZE = 64


@dataclass(frozen=True, slots=True)
class _Part:
    """The first elements of the target; on a GPU also pinned buffers of that size, oldest first."""

    target: Tensor
    memory: deque[PinnedMemory]

    @classmethod
    def of(cls, target: Tensor) -> _Part:
        count = _NUM_UNDER_WAY if target.is_cuda else 0
        return cls(target, deque(PinnedMemory(len(target), target.dtype) for _ in range(count)))


class UploadRing:
    """Async host-to-device copies into a fixed tensor, through reused pinned buffers.

    Args:
        target: `[N]` int64.
    """

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._parts: dict[int, _Part] = {}

    def copy(self, numbers: Sequence[int]) -> torch.cuda.Event | None:
        """Queues a copy of the numbers to the start of the target on the current stream, without
        waiting for it. The elements behind them become undefined.

        Returns:
            An event behind the copy, valid until the second next call; None on a CPU.
        """
        part = self._part(len(numbers))
        if not part.memory:
            part.target.numpy()[: len(numbers)] = numbers
            return None
        memory = part.memory[0]
        part.memory.rotate(-1)
        memory.wait()
        host = memory.of(part.target.shape)
        host.numpy()[: len(numbers)] = numbers
        part.target.copy_(host, non_blocking=True)
        return memory.queued()

    def _part(self, size: int) -> _Part:
        """Returns the smallest part that holds `size` numbers."""
        padded = min(max(_MIN_SIZE, 1 << (size - 1).bit_length()), len(self._target))
        if padded not in self._parts:
            self._parts[padded] = _Part.of(self._target[:padded])
        return self._parts[padded]


class UploadMemory:
    """Host memory that is written in place and uploaded without another copy on the host.

    A large array is otherwise copied several times, to new memory each time, whose first use costs
    more than the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: PinnedMemory | None = None

    def array(self, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Returns an int32 array of undefined contents. Waits until the last upload has run."""
        if self._device.type != "cuda":
            return np.empty(shape, np.int32)
        size = math.prod(shape)
        if self._pinned is not None:
            self._pinned.wait()
        if self._pinned is None or self._pinned.size < size:
            self._pinned = PinnedMemory(1 << (size - 1).bit_length(), torch.int32)
        array: NDArray[np.int32] = self._pinned.of(shape).numpy()
        return array

    def uploaded(self, array: NDArray[np.int32]) -> Tensor:
        """Queues the upload of the array returned last, which must not be written afterwards."""
        if self._pinned is None:
            return torch.from_numpy(array)
        tensor = self._pinned.of(array.shape).to(self._device, non_blocking=True)
        self._pinned.queued()
        return tensor


# Rows in pieces, which may lie on several devices.


def joined_rows(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the rows `[any, W]` of all pieces, end to end, on `device`.

    A target on the same host shares GPU memory for the rows that fit and sends the others as bytes,
    so pieces of one sequence may lie on several devices. The host waits for no copy to a GPU.
    """
    if len({piece.device for piece in pieces}) > 1:
        pieces = [_moved(piece, device) for piece in pieces]
    return _moved(torch.cat(tuple(pieces)), device)


def write_rows(pieces: Sequence[Tensor], out: Tensor) -> None:
    """Writes the rows of all pieces, end to end, to `out` `[any, W]`; see `joined_rows`."""
    if all(piece.device == out.device and piece.dtype == out.dtype for piece in pieces):
        torch.cat(tuple(pieces), out=out)
    else:
        out.copy_(joined_rows(pieces, out.device))


def _moved(rows: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or rows.device.type != "cpu":
        return rows.to(device)
    return rows.pin_memory().to(device, non_blocking=True)
