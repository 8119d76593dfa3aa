"""Feature rows in memory that target and draft share, so that only their numbers travel.

The target writes, the draft copies and frees. Neither waits: what does not fit is sent as bytes.
Rows are numbered from 0; row n lies at place n modulo the number of places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from shared.runtime.ring_memory import RingAddress, RingMemory, open_memory, share_memory


class FeatureRingWriter:
    """The target's end, written by one thread; `free` may be called by another.

    Args:
        memory: whole rows.
        width: W, elements of a row.
    """

    def __init__(self, memory: RingMemory, width: int, dtype: torch.dtype) -> None:
        self.memory = memory
        self._rows = memory.elements.view(dtype).view(-1, width)
        self._end = 0
        # None until the draft says that it reads.
        self._freed: int | None = None

    @property
    def address(self) -> RingAddress:
        """Address under which the draft opens the ring."""
        return self.memory.address

    @property
    def num_rows(self) -> int:
        """Places."""
        return len(self._rows)

    def free(self, end: int) -> None:
        """Takes the draft's word that it needs no row before `end` any more; the first one says
        that it has opened the memory.

        Raises:
            ValueError: `end` goes back, or lies beyond what was written.
        """
        if not (self._freed or 0) <= end <= self._end:
            raise ValueError(
                f"rows up to {end} were freed; {self._freed or 0} to {self._end} can be"
            )
        if self._freed is None:
            self.memory.hide()
        self._freed = end

    def write(self, rows: Tensor) -> int | None:
        """Writes rows `[R, W]` and returns the number of the first; None when they do not fit or
        nobody reads. When it returns, another process can read them."""
        freed = self._freed
        if freed is None or self._end + len(rows) - freed > self.num_rows:
            return None
        start, self._end = self._end, self._end + len(rows)
        first = 0
        for place, count in _spans(start, len(rows), self.num_rows):
            self._rows[place : place + count].copy_(rows[first : first + count])
            first += count
        if self._rows.device.type == "cuda":
            # Bytes would be copied to the host here, which waits as well.
            torch.cuda.current_stream(self._rows.device).synchronize()
        return start


class FeatureRings:
    """The rings of one target, one for each draft of its host.

    Memory on a GPU must not be freed while another process may read it, and a draft that was cut
    off may. So it is kept, and the next draft of that size gets it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[RingMemory] = []

    @property
    def is_on_cuda(self) -> bool:
        """Whether rows lie on a GPU."""
        return self._device.type == "cuda"

    def open(self, num_rows: int, width: int, dtype: torch.dtype) -> FeatureRingWriter:
        """Returns a new ring.

        Raises:
            RingUnavailable: the memory cannot be shared.
        """
        size_bytes = num_rows * width * dtype.itemsize
        for index, memory in enumerate(self._idle):
            if len(memory.elements) == size_bytes:
                return FeatureRingWriter(self._idle.pop(index), width, dtype)
        return FeatureRingWriter(share_memory(size_bytes, self._device), width, dtype)

    def close(self, ring: FeatureRingWriter) -> None:
        """Takes a ring back."""
        if self.is_on_cuda:
            self._idle.append(ring.memory)


class FeatureRingReader:
    """The draft's end.

    Args:
        device: of the draft; rows of a GPU's ring are copied to it.

    Raises:
        RingUnavailable: the memory cannot be opened.
    """

    def __init__(
        self,
        address: RingAddress,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_rows = num_rows
        self._width, self._dtype = width, dtype
        self._row_bytes = width * dtype.itemsize
        self._memory = open_memory(address, num_rows * self._row_bytes, device)
        self._copied: deque[tuple[range, torch.cuda.Event | None]] = deque()
        self._end = 0
        # Ends of what was copied before rows in front of it, by its start.
        self._ahead: dict[int, int] = {}
        self._told: int | None = None

    def read(self, start: int, count: int) -> Tensor:
        """Returns a copy `[count, W]` without waiting for it: on the draft's device where the ring
        is a GPU's, else in host memory.

        Raises:
            ValueError: no ring holds such rows.
        """
        if start < 0 or not 0 <= count <= self.num_rows:
            raise ValueError(f"{count} rows from {start}; the ring has {self.num_rows}")
        device, first = self._memory.device, 0
        rows = torch.empty((count, self._width), dtype=self._dtype, device=device)
        for place, length in _spans(start, count, self.num_rows):
            self._memory.copy(place * self._row_bytes, rows[first : first + length])
            first += length
        if count:
            event = _recorded(device) if device.type == "cuda" else None
            self._copied.append((range(start, start + count), event))
        return rows

    def freed(self) -> int | None:
        """Returns the number before which all rows are copied, when it is time to tell: at first,
        and after every quarter of the ring; else None. Rows may be read in any order."""
        while self._copied and _is_over(self._copied[0][1]):
            copied, _ = self._copied.popleft()
            self._ahead[copied.start] = copied.stop
        while self._end in self._ahead:
            self._end = self._ahead.pop(self._end)
        if self._told is not None and self._end - self._told < max(self.num_rows // 4, 1):
            return None
        self._told = self._end
        return self._end


def _spans(start: int, count: int, num_rows: int) -> Iterator[tuple[int, int]]:
    """Yields the places of rows as spans, each its first place and its length: the end of the ring,
    and what goes on at its beginning."""
    place = start % num_rows
    straight = min(count, num_rows - place)
    if straight:
        yield place, straight
    if count > straight:
        yield 0, count - straight


def _recorded(device: torch.device) -> torch.cuda.Event:
    """Returns an event behind all that the device was given so far; the thread's own device may be
    another one."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _is_over(event: torch.cuda.Event | None) -> bool:
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]
