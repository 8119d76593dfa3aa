"""Tensors that a kernel is to fill, several in one allocation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16


def empties(
    count: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Returns `count` contiguous tensors of one shape with undefined elements, 16-byte aligned.

    Triton compiles a kernel once for each pattern of aligned pointers. Tensors of one allocation
    that begin where another ends would be aligned for some sizes only, and a size that is new under
    traffic would wait for the compiler.
    """
    size = torch.Size(shape).numel()
    per_line = _ALIGNMENT // dtype.itemsize
    padded = size + -size % per_line
    rows = torch.empty((count, padded), dtype=dtype, device=device)
    return tuple(row[:size].view(*shape) for row in rows.unbind())
