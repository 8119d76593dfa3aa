"""Arrays of the host on their way to the device, all in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]
# Kernels count on whole vector loads.
_ALIGNMENT = 16
_TORCH_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.bool_): torch.bool,
}


def uploaded(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Returns the arrays as tensors of the device, of their shapes and types, 16-byte aligned.

    A copy to a GPU costs the host about ten microseconds whatever its size, so they share one. It
    is queued from pinned memory: the host waits neither for it nor for what is queued before it.

    Args:
        arrays: of int64, int32 or bool. They are copied before this returns.
    """
    sizes = [_aligned(array.nbytes) for array in arrays]
    host = _packed(arrays, sizes, is_pinned=device.type == "cuda")
    parts = torch.split(host.to(device, non_blocking=True), sizes)
    return [_as(array, part) for array, part in zip(arrays, parts, strict=True)]


class UploadBlock:
    """Tensors at addresses that never change, as a CUDA graph reads them, filled by one copy.

    Args:
        arrays: what they hold at first, with their shapes and types, see `uploaded`.
        spare: an array of the type, and the most elements, of what `fill` brings beside them.

    Attributes:
        tensors: one for each array.
    """

    def __init__(self, arrays: Sequence[Array], spare: Array, device: torch.device) -> None:
        self._sizes = [_aligned(array.nbytes) for array in arrays]
        num_bytes = sum(self._sizes)
        self._memory = torch.empty(num_bytes + spare.nbytes, dtype=torch.uint8, device=device)
        parts = torch.split(self._memory[:num_bytes], self._sizes)
        self.tensors = [_as(array, part) for array, part in zip(arrays, parts, strict=True)]
        self._spare = self._memory[num_bytes:].view(_TORCH_TYPES[spare.dtype])
        self.fill(arrays, spare[:0])

    def fill(self, arrays: Sequence[Array], beside: Array) -> Tensor:
        """Writes arrays of the same shapes and types, which are copied before this returns; waits
        for nothing.

        Args:
            beside: of any shape.

        Returns:
            That, on the device until the next call.
        """
        sizes = [*self._sizes, beside.nbytes]
        host = _packed([*arrays, beside], sizes, is_pinned=self._memory.is_cuda)
        self._memory[: len(host)].copy_(host, non_blocking=True)
        return self._spare[: beside.size].view(beside.shape)


def uploaded_numbers(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Returns numbers as an int64 tensor of the device, `[N]` or `[N, M]`; the host waits for
    nothing."""
    [numbers] = uploaded([np.array(values, np.int64)], device)
    return numbers


def uploaded_moves(moves: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the sources and the targets of one move or more, `[N]` int64 each, on the device."""
    sources, targets = uploaded_numbers(tuple(zip(*moves, strict=True)), device).unbind()
    return sources, targets


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _packed(arrays: Sequence[Array], sizes: Sequence[int], *, is_pinned: bool) -> Tensor:
    """Returns bytes of the host that hold the arrays, each in its size."""
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned)
    memory, offset = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        part = np.frombuffer(memory, array.dtype, array.size, offset)
        part.reshape(array.shape)[...] = array
        offset += size
    return host


def _as(array: Array, part: Tensor) -> Tensor:
    typed = part.view(_TORCH_TYPES[array.dtype])
    if len(typed) != array.size:
        typed = typed[: array.size]
    return typed if array.ndim == 1 else typed.view(array.shape)
