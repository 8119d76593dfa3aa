"""Copies between host and device that nobody waits for until the values are needed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class PinnedMemory:
    """Memory of the host for one copy at a time, and an event behind that copy.

    To ask for pinned memory costs the host as much as to queue a copy, so copies that come again
    and again keep theirs.

    Args:
        size: most elements.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._elements = torch.empty(size, dtype=dtype, pin_memory=True)
        self._views: dict[tuple[int, ...], Tensor] = {}
        self._ran = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def of(self, shape: tuple[int, ...]) -> Tensor:
        """Returns its beginning as a tensor of a shape, which is one of few."""
        view = self._views.get(shape)
        if view is None:
            view = self._elements[: math.prod(shape)].view(shape)
            self._views[shape] = view
        return view

    def queued(self) -> torch.cuda.Event:
        """The copy was queued on this thread's stream; returns the event behind it."""
        self._ran.record()
        return self._ran

    def wait(self) -> None:
        """Waits until the copy that was queued last has run; nothing is to wait for at first."""
        wait_for(self._ran)


class HostCopy:
    """Starts to copy a tensor behind the work queued so far, without waiting for any of it.

    Tensors of the host are taken as they are: nothing may write to them before `read`.

    Args:
        memory: for the copy, and for no other one before `read`; None asks for some.
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
        """Waits until the copy is there and returns it."""
        if self._is_done is not None:
            wait_for(self._is_done)
        return self._host


class DeviceMark:
    """Tells whether the work that was queued before `put` is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def put(self) -> None:
        """Marks the end of what is queued so far, in place of an earlier mark."""
        if self._event is not None:
            self._event.record()

    @property
    def is_passed(self) -> bool:
        """Whether the device has come to the mark, or none was put."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


def wait_for(event: torch.cuda.Event) -> None:
    """Waits for an event; without a chance for other threads to take the interpreter where there is
    nothing to wait for."""
    if not event.query():  # type: ignore[no-untyped-call]
        event.synchronize()


_NUM_UNDER_WAY = 2
"""Copies in flight of one size before the host waits for the oldest."""
_LEAST = 64


@dataclass(frozen=True, slots=True)
class _Part:
    """The first elements of the target, and on a GPU pinned buffers of that size, oldest first."""

    target: Tensor
    memory: deque[PinnedMemory]

    @classmethod
    def of(cls, target: Tensor) -> _Part:
        count = _NUM_UNDER_WAY if target.is_cuda else 0
        return cls(target, deque(PinnedMemory(len(target), target.dtype) for _ in range(count)))


class UploadRing:
    """Copies through buffers that are reused, one set for each of a few sizes.

    Args:
        target: `[N]` int64.
    """

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._parts: dict[int, _Part] = {}

    def copy(self, numbers: Sequence[int]) -> torch.cuda.Event | None:
        """Queues a copy of the numbers on the current stream, without waiting for it. The elements
        after them are undefined then.

        Returns:
            An event after the copy, valid until the second next call; None on a CPU.
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
        padded = min(max(_LEAST, 1 << (size - 1).bit_length()), len(self._target))
        if padded not in self._parts:
            self._parts[padded] = _Part.of(self._target[:padded])
        return self._parts[padded]


# Rows that came in pieces, wherever those lie.


def joined_rows(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the rows `[any, W]` of all pieces, end to end, on `device`.

    Targets of the same host share memory of their GPUs for what fits, and send the rest as bytes:
    pieces of one sequence may lie on several devices. The host waits for no copy to a GPU.
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
