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
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory, offset = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        part = np.frombuffer(memory, array.dtype, array.size, offset)
        part.reshape(array.shape)[...] = array
        offset += size
    parts = torch.split(host.to(device, non_blocking=True), sizes)
    return [_as(array, part) for array, part in zip(arrays, parts, strict=True)]


def uploaded_numbers(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Returns numbers as an int64 tensor of the device, `[N]` or `[N, M]`; the host waits for
    nothing."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _as(array: Array, part: Tensor) -> Tensor:
    typed = part.view(_TORCH_TYPES[array.dtype])
    if len(typed) != array.size:
        typed = typed[: array.size]
    return typed if array.ndim == 1 else typed.view(array.shape)
