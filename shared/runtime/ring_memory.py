"""Memory that two processes of one host share: a file in memory, or an allocation on a GPU."""

from __future__ import annotations

import mmap
import os
import re
import secrets
import weakref
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


class _CudaBytes:
    """CUDA memory as `torch.as_tensor` takes it."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _allocate_cuda(size_bytes: int) -> RingMemory:
    # Not by torch: its allocator cuts several tensors out of what a handle stands for.
    runtime = _cuda_runtime()
    (pointer,) = _checked(runtime.cudaMalloc(size_bytes))
    (handle,) = _checked(runtime.cudaIpcGetMemHandle(pointer))
    elements = torch.as_tensor(_CudaBytes(pointer, size_bytes), device="cuda")
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
