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
from typing import Any

import torch
from torch import Tensor

_FOLDER = Path("/dev/shm")
_TOKEN = re.compile(r"[0-9a-f]{32}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RingUnavailable(Exception):
    """Memory cannot be shared here. Features travel as bytes instead, so nobody fails of it."""


@dataclass(frozen=True, slots=True)
class RingAddress:
    """How another process finds the memory; one of both is set.

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


def open_memory(address: RingAddress, size_bytes: int) -> RingMemory:
    """Opens memory that another process shares. It must not be used after that process has ended.

    Raises:
        RingUnavailable: it is not there, is smaller, or belongs to another user or device.
    """
    try:
        if address.cuda_ipc_handle:
            return _open_cuda(address, size_bytes)
        return _open_file(address, size_bytes)
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


def _open_file(address: RingAddress, size_bytes: int) -> RingMemory:
    return RingMemory(address, _mapped(_path(address.shared_file), os.O_RDWR, size_bytes))


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


def _open_cuda(address: RingAddress, size_bytes: int) -> RingMemory:
    runtime = _cuda_runtime()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    handle = runtime.cudaIpcMemHandle_t()
    handle.reserved = address.cuda_ipc_handle
    flags = runtime.cudaIpcMemLazyEnablePeerAccess
    (pointer,) = _checked(runtime.cudaIpcOpenMemHandle(handle, flags))
    # It may lie on another device than this thread's, to which torch would copy it.
    (attributes,) = _checked(runtime.cudaPointerGetAttributes(pointer))
    device = torch.device("cuda", attributes.device)
    elements = torch.as_tensor(_CudaBytes(pointer, size_bytes), device=device)
    memory = RingMemory(address, elements)
    weakref.finalize(memory, runtime.cudaIpcCloseMemHandle, pointer)
    return memory


def _cuda_runtime() -> ModuleType:
    """CUDA builds of torch bring this binding."""
    from cuda.bindings import runtime  # type: ignore[import-not-found]

    module: ModuleType = runtime
    return module


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA says {error.name}")
    return tuple(values)
