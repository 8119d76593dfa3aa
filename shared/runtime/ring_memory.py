"""Memory that two processes of one host share, a file in memory or an allocation on a GPU; and
rings of feature rows in it."""

from __future__ import annotations

import mmap
import os
import re
import secrets
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

_FOLDER = Path("/dev/shm")
_TOKEN = re.compile(r"[0-9a-f]{32}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RingUnavailable(Exception):
    """Memory cannot be shared here. Features travel as bytes instead, so nobody fails of it."""


@dataclass(frozen=True, slots=True)
class RingAddress:
    """The address of the memory for other processes; exactly one attribute is set.

    Attributes:
        shared_file: random part of the name of a file in shared memory.
        cuda_ipc_handle: of a CUDA allocation.
    """

    shared_file: str = ""
    cuda_ipc_handle: bytes = b""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RingMemory:
    """Shared bytes; they go with this object, whatever views of them there are.

    Attributes:
        elements: `[size]` uint8, on the device that holds them.
    """

    address: RingAddress
    elements: Tensor

    def hide(self) -> None:
        """Nobody else can open a file from now on, and nothing is left of it if its owner is
        killed. Those who opened it keep what they mapped."""
        if self.address.shared_file:
            _path(self.address.shared_file).unlink(missing_ok=True)


def host_id() -> str:
    """Returns what tells this host, since its last boot, from others; empty where nothing does."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def share_memory(size_bytes: int, device: torch.device) -> RingMemory:
    """Allocates memory on the device that other processes can open. It lives as long as the
    result.

    Raises:
        RingUnavailable: the platform has no such memory, or none is left.
    """
    try:
        if device.type == "cuda":
            with torch.cuda.device(device):
                return _allocate_cuda(size_bytes)
        return _create_file(size_bytes)
    except (OSError, RuntimeError, ImportError) as error:
        raise RingUnavailable(f"{size_bytes:,} bytes on {device}: {error}") from error


class OpenedMemory(Protocol):
    """Memory that another process shares.

    Attributes:
        device: of what it is copied to.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def pointer(self) -> int:
        """Its address for kernels of `device`."""

    def copy(self, start_bytes: int, out: Tensor) -> None:
        """Fills `out`, contiguous and on `device`, with what begins there; on a GPU it is queued
        on the thread's current stream of that device."""

    def write(self, start_bytes: int, source: Tensor) -> None:
        """Writes a contiguous tensor of `device` there, queued likewise."""


def open_memory(address: RingAddress, size_bytes: int, device: torch.device) -> OpenedMemory:
    """Opens memory that another process shares. It must not be used after that process has ended.

    Args:
        device: of whoever reads a GPU's memory; files are read into host memory.

    Raises:
        RingUnavailable: it is not there, is smaller, or belongs to another user, or to a GPU that
            `device` cannot read.
    """
    try:
        if address.cuda_ipc_handle:
            return _CudaPeer(address.cuda_ipc_handle, device)
        return _HostFile(address.shared_file, size_bytes)
    except (OSError, RuntimeError, ImportError, ValueError) as error:
        raise RingUnavailable(str(error)) from error


def _create_file(size_bytes: int) -> RingMemory:
    token = secrets.token_hex(16)
    path = _path(token)
    elements = _mapped(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, size_bytes)
    memory = RingMemory(RingAddress(shared_file=token), elements)
    # Those who opened it keep what they mapped.
    weakref.finalize(memory, path.unlink, missing_ok=True)
    return memory


class _HostFile:
    """A file in memory, mapped."""

    device = torch.device("cpu")

    def __init__(self, name: str, size_bytes: int) -> None:
        self._elements = _mapped(_path(name), os.O_RDWR, size_bytes)

    @property
    def pointer(self) -> int:
        return self._elements.data_ptr()

    def copy(self, start_bytes: int, out: Tensor) -> None:
        num_bytes = out.numel() * out.element_size()
        out.view(-1).view(torch.uint8).copy_(self._elements[start_bytes : start_bytes + num_bytes])

    def write(self, start_bytes: int, source: Tensor) -> None:
        num_bytes = source.numel() * source.element_size()
        part = self._elements[start_bytes : start_bytes + num_bytes]
        part.copy_(source.view(-1).view(torch.uint8))


def _path(token: str) -> Path:
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{token!r} is no name of shared memory")
    return _FOLDER / f"outrider-{token}"


def _mapped(path: Path, flags: int, size_bytes: int) -> Tensor:
    descriptor = os.open(path, flags, 0o600)
    try:
        if flags & os.O_CREAT:
            os.posix_fallocate(descriptor, 0, size_bytes)
        return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


class CudaMemory:
    """Memory of a GPU as `torch.as_tensor` takes it, which does not keep it.

    Args:
        kind: of its elements, as numpy writes it.
    """

    def __init__(self, pointer: int, count: int, kind: str = "|u1") -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": kind,
            "data": (pointer, False),
            "version": 3,
        }


def _allocate_cuda(size_bytes: int) -> RingMemory:
    # Not by torch: its allocator cuts several tensors out of what a handle stands for.
    runtime = _cuda_runtime()
    (pointer,) = _checked(runtime.cudaMalloc(size_bytes))
    (handle,) = _checked(runtime.cudaIpcGetMemHandle(pointer))
    elements = torch.as_tensor(CudaMemory(pointer, size_bytes), device="cuda")
    memory = RingMemory(RingAddress(cuda_ipc_handle=bytes(handle.reserved)), elements)
    weakref.finalize(memory, runtime.cudaFree, pointer)
    return memory


class _CudaPeer:
    """An allocation of another process, mapped for the GPU that reads it.

    Copies are queued on that GPU and made by its copy engines. A kernel would run on the GPU that
    holds the memory, which takes turns with the target's, milliseconds each.
    """

    def __init__(self, ipc_handle: bytes, device: torch.device) -> None:
        self.device = device
        self._runtime = runtime = _cuda_runtime()
        handle = runtime.cudaIpcMemHandle_t()
        handle.reserved = ipc_handle
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the device's context if there is none
            flags = runtime.cudaIpcMemLazyEnablePeerAccess
            (pointer,) = _checked(runtime.cudaIpcOpenMemHandle(handle, flags))
        self.pointer = int(pointer)
        weakref.finalize(self, runtime.cudaIpcCloseMemHandle, pointer)

    def copy(self, start_bytes: int, out: Tensor) -> None:
        self._queue_copy(out.data_ptr(), self.pointer + start_bytes, out)

    def write(self, start_bytes: int, source: Tensor) -> None:
        self._queue_copy(self.pointer + start_bytes, source.data_ptr(), source)

    def _queue_copy(self, target: int, source: int, tensor: Tensor) -> None:
        runtime, num_bytes = self._runtime, tensor.numel() * tensor.element_size()
        # A stream of no name is that of the current device.
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream().cuda_stream
            kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
            _checked(runtime.cudaMemcpyAsync(target, source, num_bytes, kind, stream))


def shared_part(tensor: Tensor) -> tuple[RingAddress, int]:
    """Returns the address of the allocation that a tensor lies in, and where in it, in bytes. It
    must not be freed while another process may read it.

    Raises:
        RingUnavailable: other processes cannot open the allocation.
    """
    if not tensor.is_cuda:
        raise RingUnavailable("a tensor of the host is in no file")
    try:
        from cuda.bindings import driver

        base, _ = _checked(driver.cuMemGetAddressRange(tensor.data_ptr()))
        with torch.cuda.device(tensor.device):
            (handle,) = _checked(_cuda_runtime().cudaIpcGetMemHandle(int(base)))
    except (RuntimeError, ImportError) as error:
        raise RingUnavailable(f"a tensor on {tensor.device}: {error}") from error
    return RingAddress(cuda_ipc_handle=bytes(handle.reserved)), tensor.data_ptr() - int(base)


def _cuda_runtime() -> ModuleType:
    """CUDA builds of torch bring this binding."""
    from cuda.bindings import runtime

    module: ModuleType = runtime
    return module


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA says {error.name}")
    return tuple(values)


# Feature rows in memory that target and draft share, so that only their numbers travel.
#
# The target writes, the draft copies and frees. Neither waits: what does not fit is sent as bytes.
# Rows are numbered from 0; row n lies at place n modulo the number of places.


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
