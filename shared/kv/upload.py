"""Host arrays copied to the device, and device tensors copied back, several in one copy."""

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

_NUMPY_TYPES: dict[torch.dtype, Any] = {tensor: array for array, tensor in _TORCH_TYPES.items()}


def uploaded(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Returns the arrays as device tensors of the same shapes and types, 16-byte aligned.

    A copy to a GPU costs the host about ten microseconds whatever its size, so all arrays share
    one. The copy is queued from pinned memory: the host waits neither for it nor for earlier work.

    Args:
        arrays: int64, int32 or bool. They may be changed once this returns.
    """
    host = _packed(arrays, is_pinned=device.type == "cuda")
    return _parts(host.to(device, non_blocking=True), arrays)


class UploadBlock:
    """Device tensors at fixed addresses, as a CUDA graph needs them, filled by one copy.

    Args:
        arrays: the first contents, with the shapes and types of the tensors; see `uploaded`.
        extra_limit: an array of the type and the largest size of `fill`'s `extra`.
    """

    def __init__(self, arrays: Sequence[Array], extra_limit: Array, device: torch.device) -> None:
        num_bytes = sum(_aligned(array.nbytes) for array in arrays)
        size = num_bytes + _aligned(extra_limit.nbytes)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors = _parts(self._memory, arrays)
        self._extra = self._memory[num_bytes:].view(_TORCH_TYPES[extra_limit.dtype])
        self.fill(arrays, extra_limit[:0])

    def fill(self, arrays: Sequence[Array], extra: Array) -> Tensor:
        """Queues a copy of arrays of the same shapes and types into the tensors. Does not wait for
        the device; the arrays may be changed once this returns.

        Args:
            extra: one more array, of any shape.

        Returns:
            `extra` on the device, valid until the next call.
        """
        host = _packed([*arrays, extra], is_pinned=self._memory.is_cuda)
        self._memory[: len(host)].copy_(host, non_blocking=True)
        return self._extra[: extra.size].view(extra.shape)


def downloaded(tensors: Sequence[Tensor]) -> list[Array]:
    """Returns tensors of one device, of int64, int32 or bool, as host arrays, all in one copy;
    waits for the device."""
    packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).cpu().numpy()
    arrays, start = [], 0
    for tensor in tensors:
        part = packed[start : start + tensor.nbytes].view(_NUMPY_TYPES[tensor.dtype])
        arrays.append(part.reshape(tensor.shape))
        start += tensor.nbytes
    return arrays


def uploaded_numbers(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Returns numbers as an int64 device tensor, `[N]` or `[N, M]`. Does not wait."""
    [numbers] = uploaded([np.array(values, np.int64)], device)
    return numbers


def uploaded_pairs(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the first and the second numbers of at least one pair, `[N]` int64 each, on the
    device."""
    first, second = uploaded_numbers(tuple(zip(*pairs, strict=True)), device).unbind()
    return first, second


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT


def _packed(arrays: Sequence[Array], *, is_pinned: bool) -> Tensor:
    """Returns the arrays' bytes in host memory, each array at an aligned offset."""
    # Joining bytes is several times as fast as writing arrays into slices of a larger array.
    pieces = [
        piece for array in arrays for piece in (array.tobytes(), _PADS[-array.nbytes % _ALIGNMENT])
    ]
    packed = np.frombuffer(b"".join(pieces), np.uint8)
    host = torch.empty(len(packed), dtype=torch.uint8, pin_memory=is_pinned)
    host.numpy()[:] = packed
    return host


def _parts(packed: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """Returns views of the bytes that `_packed` wrote, one for each array."""
    typed = {dtype: packed.view(_TORCH_TYPES[dtype]) for dtype in {array.dtype for array in arrays}}
    parts, start = [], 0
    for array in arrays:
        first = start // array.itemsize
        part = typed[array.dtype][first : first + array.size]
        parts.append(part if array.ndim == 1 else part.view(array.shape))
        start += _aligned(array.nbytes)
    return parts
