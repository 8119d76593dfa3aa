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
_PADS = [bytes(size) for size in range(_ALIGNMENT)]
_TORCH_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.bool_): torch.bool,
}

_NUMPY_TYPES: dict[torch.dtype, Any] = {ours: theirs for theirs, ours in _TORCH_TYPES.items()}


def uploaded(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Returns the arrays as tensors of the device, of their shapes and types, 16-byte aligned.

    A copy to a GPU costs the host about ten microseconds whatever its size, so they share one. It
    is queued from pinned memory: the host waits neither for it nor for what is queued before it.

    Args:
        arrays: of int64, int32 or bool. They are copied before this returns.
    """
    host = _packed(arrays, is_pinned=device.type == "cuda")
    return _parts(host.to(device, non_blocking=True), arrays)


class UploadBlock:
    """Tensors at addresses that never change, as a CUDA graph reads them, filled by one copy.

    Args:
        arrays: what they hold at first, with their shapes and types, see `uploaded`.
        spare: an array of the type, and the most elements, of what `fill` brings beside them.

    Attributes:
        tensors: one for each array.
    """

    def __init__(self, arrays: Sequence[Array], spare: Array, device: torch.device) -> None:
        num_bytes = sum(_aligned(array.nbytes) for array in arrays)
        size = num_bytes + _aligned(spare.nbytes)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors = _parts(self._memory, arrays)
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
        host = _packed([*arrays, beside], is_pinned=self._memory.is_cuda)
        self._memory[: len(host)].copy_(host, non_blocking=True)
        return self._spare[: beside.size].view(beside.shape)


def downloaded(tensors: Sequence[Tensor]) -> list[Array]:
    """Returns tensors of one device, of int64, int32 or bool, as arrays of the host, all in one
    copy; waits for the device."""
    packed = torch.cat([each.reshape(-1).view(torch.uint8) for each in tensors]).cpu().numpy()
    arrays, start = [], 0
    for each in tensors:
        own = packed[start : start + each.nbytes].view(_NUMPY_TYPES[each.dtype])
        arrays.append(own.reshape(each.shape))
        start += each.nbytes
    return arrays


def uploaded_numbers(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Returns numbers as an int64 tensor of the device, `[N]` or `[N, M]`; the host waits for
    nothing."""
    [numbers] = uploaded([np.array(values, np.int64)], device)
    return numbers


def uploaded_pairs(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the first and the second numbers of one pair or more, `[N]` int64 each, on the
    device."""
    first, second = uploaded_numbers(tuple(zip(*pairs, strict=True)), device).unbind()
    return first, second


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT


def _packed(arrays: Sequence[Array], *, is_pinned: bool) -> Tensor:
    """Returns bytes of the host that hold the arrays, each from an aligned place on."""
    # Bytes are joined several times as fast as arrays are written to parts of another.
    pieces = [
        piece for each in arrays for piece in (each.tobytes(), _PADS[-each.nbytes % _ALIGNMENT])
    ]
    packed = np.frombuffer(b"".join(pieces), np.uint8)
    host = torch.empty(len(packed), dtype=torch.uint8, pin_memory=is_pinned)
    host.numpy()[:] = packed
    return host


def _parts(packed: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """Returns the arrays as tensors, where `_packed` has placed them."""
    typed = {dtype: packed.view(_TORCH_TYPES[dtype]) for dtype in {each.dtype for each in arrays}}
    parts, start = [], 0
    for each in arrays:
        first = start // each.itemsize
        part = typed[each.dtype][first : first + each.size]
        parts.append(part if each.ndim == 1 else part.view(each.shape))
        start += _aligned(each.nbytes)
    return parts
