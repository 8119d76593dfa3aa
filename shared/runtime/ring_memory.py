"""Memory shared by two processes of one host (a file in shared memory or a GPU allocation), and
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
    """Memory cannot be shared here. Not fatal, because features can be sent as bytes instead."""


@dataclass(frozen=True, slots=True)
class RingAddress:
    """The address of the memory for other processes; exactly one attribute is set.

    Attributes:
        shared_file: random part of the name of a file in shared memory.
        cuda_ipc_handle: handle of a CUDA allocation.
    """

    shared_file: str = ""
    cuda_ipc_handle: bytes = b""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RingMemory:
    """Shared bytes, freed together with this object, even if views of them exist.

    Attributes:
        elements: `[size]` uint8, on the device that holds them.
    """

    address: RingAddress
    elements: Tensor

    def hide(self) -> None:
        """Unlinks a file, so that no further process can open it, and none is left behind if its
        owner is killed. Processes that opened it keep their mappings."""
        if self.address.shared_file:
            _path(self.address.shared_file).unlink(missing_ok=True)


def host_id() -> str:
    """Returns an id of this host since its last boot; empty if the platform has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def share_memory(size_bytes: int, device: torch.device) -> RingMemory:
    """Allocates memory on the device that other processes can open. It lives as long as the result.

    Raises:
        RingUnavailable: the platform cannot share memory, or none is left.
    """
    try:
        if device.type == "cuda":
            with torch.cuda.device(device):
                return _allocate_cuda(size_bytes)
        return _create_file(size_bytes)
    except (OSError, RuntimeError, ImportError) as error:
        raise RingUnavailable(f"{size_bytes:,} bytes on {device}: {error}") from error


class OpenedMemory(Protocol):
    """Memory of another process.

    Attributes:
        device: device of the tensors that copies fill.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def pointer(self) -> int:
        """Address of the memory for kernels of `device`."""

    def copy(self, start_bytes: int, out: Tensor) -> None:
        """Fills `out`, contiguous and on `device`, from an offset on. On a GPU the copy is queued
        on the thread's current stream of that device."""

    def write(self, start_bytes: int, source: Tensor) -> None:
        """Writes a contiguous tensor of `device` to an offset; queued like `copy`."""


def open_memory(address: RingAddress, size_bytes: int, device: torch.device) -> OpenedMemory:
    """Opens memory that another process shares. It must not be used after that process has ended.

    Args:
        device: device that reads a GPU's memory; files are read into host memory.

    Raises:
        RingUnavailable: the memory does not exist, is too small, or belongs to another user, or to
            a GPU that `device` cannot read.
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
    try:
        elements = _mapped(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, size_bytes)
    except OSError:  # there is no room for it
        path.unlink(missing_ok=True)
        raise
    memory = RingMemory(RingAddress(shared_file=token), elements)
    weakref.finalize(memory, path.unlink, missing_ok=True)
    return memory


class _HostFile:
    """A mapped file in shared memory."""

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
    """Bytes of a GPU in the form that `torch.as_tensor` takes; the tensor does not own them."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _allocate_cuda(size_bytes: int) -> RingMemory:
    # Not by torch, whose allocator places several tensors in the allocation of one handle.
    runtime = _cuda_runtime()
    (pointer,) = _checked(runtime.cudaMalloc(size_bytes))
    (handle,) = _checked(runtime.cudaIpcGetMemHandle(pointer))
    elements = torch.as_tensor(CudaMemory(pointer, size_bytes), device="cuda")
    memory = RingMemory(RingAddress(cuda_ipc_handle=bytes(handle.reserved)), elements)
    weakref.finalize(memory, runtime.cudaFree, pointer)
    return memory


class _CudaPeer:
    """An allocation of another process, mapped for the GPU that reads it.

    Copies are queued on the reading GPU and run on its copy engines. A kernel would run on the GPU
    that holds the memory and take turns with the target's kernels, milliseconds each.
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
        # The handle of the default stream refers to the current device.
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream().cuda_stream
            kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
            _checked(runtime.cudaMemcpyAsync(target, source, num_bytes, kind, stream))


def shared_part(tensor: Tensor) -> tuple[RingAddress, int]:
    """Returns the address of the allocation that holds a tensor, and the tensor's offset in bytes.
    The allocation must not be freed while another process may read it.

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


# Feature rows in memory shared by target and draft, so that messages carry only row numbers.
#
# The target writes, the draft copies and frees. Neither waits: rows that do not fit are sent as
# bytes. Rows are numbered from 0; row n lies at place n modulo the number of places.


class FeatureRingWriter:
    """The target's end, written by one thread; another thread may call `free`.

    Args:
        memory: memory of whole rows.
        width: W, elements of a row.
    """

    def __init__(self, memory: RingMemory, width: int, dtype: torch.dtype) -> None:
        self.memory = memory
        self._rows = memory.elements.view(dtype).view(-1, width)
        self._end = 0
        # None until the draft has opened the ring.
        self._freed: int | None = None

    @property
    def address(self) -> RingAddress:
        """Address under which the draft opens the ring."""
        return self.memory.address

    @property
    def num_rows(self) -> int:
        """Number of places."""
        return len(self._rows)

    def free(self, end: int) -> None:
        """Frees all rows before `end`, at the draft's request. The first call means that the draft
        has opened the memory.

        Raises:
            ValueError: `end` goes back, or lies beyond the written rows.
        """
        if not (self._freed or 0) <= end <= self._end:
            raise ValueError(
                f"rows up to {end} were freed; {self._freed or 0} to {self._end} can be"
            )
        if self._freed is None:
            self.memory.hide()
        self._freed = end

    def write(self, rows: Tensor) -> int | None:
        """Writes rows `[R, W]`, which another process can read when this returns. Returns the
        number of the first row; None if they do not fit, or no draft reads the ring."""
        freed = self._freed
        if freed is None or self._end + len(rows) - freed > self.num_rows:
            return None
        start, self._end = self._end, self._end + len(rows)
        first = 0
        for place, count in _spans(start, len(rows), self.num_rows):
            self._rows[place : place + count].copy_(rows[first : first + count])
            first += count
        if self._rows.device.type == "cuda":
            # The alternative, sending bytes, would wait for a copy to the host as well.
            torch.cuda.current_stream(self._rows.device).synchronize()
        return start


class FeatureRings:
    """The rings of one target, one for each draft on its host.

    GPU memory must not be freed while another process may read it, and a disconnected draft still
    may. So it is kept, and the next draft with a ring of that size reuses it.
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
        """Takes back the ring of a draft."""
        if self.is_on_cuda:
            self._idle.append(ring.memory)


class FeatureRingReader:
    """The draft's end.

    Args:
        device: the draft's device, to which rows of a GPU's ring are copied.

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
        # Copied spans that wait for rows before them: end by start.
        self._ahead: dict[int, int] = {}
        self._reported: int | None = None

    def read(self, start: int, count: int) -> Tensor:
        """Returns a copy `[count, W]` without waiting for it: on the draft's device if the ring is
        on a GPU, else in host memory.

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
        """Returns the number before which all rows are copied, if it is due for a report: at first,
        and after every quarter of the ring; else None. Rows may be read in any order."""
        while self._copied:
            copied, event = self._copied[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                break
            self._copied.popleft()
            self._ahead[copied.start] = copied.stop
        while self._end in self._ahead:
            self._end = self._ahead.pop(self._end)
        if self._reported is not None and self._end - self._reported < max(self.num_rows // 4, 1):
            return None
        self._reported = self._end
        return self._end


def _spans(start: int, count: int, num_rows: int) -> Iterator[tuple[int, int]]:
    """Yields the spans of places that rows take, as first place and length: one up to the end of
    the ring, and one from its beginning."""
    place = start % num_rows
    straight = min(count, num_rows - place)
    if straight:
        yield place, straight
    if count > straight:
        yield 0, count - straight


def _recorded(device: torch.device) -> torch.cuda.Event:
    """Returns an event behind all work queued on the device so far, which may not be the thread's
    current device."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
