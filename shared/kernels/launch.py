"""What launches of small kernels share: no idle time between them, and aligned outputs.

In a decode step of few rows a kernel runs for two microseconds, and getting it started takes about
one. A *dependent* kernel is put on the multiprocessors before its predecessor has ended, and waits
there (`dependent_jit.begin`). Hopper and later have it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_CAPABILITY = (9, 0)
# Measured on an H200 with an 8B decoder: a forward of 1 or 8 rows takes 2 % less, one of 64 rows
# 1 % more, because waiting programs hold places that running ones could use.
_MAX_ROWS = 32

_ALIGNMENT = 16


def dependent_launch(
    device: torch.device, num_rows: int, *, most_rows: int = _MAX_ROWS
) -> dict[str, bool]:
    """Returns the launch options of a kernel that calls `begin(IS_DEPENDENT)`.

    Args:
        num_rows: rows of the forward; where a program takes several, those that one takes count
            as one.
        most_rows: with which it pays.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or num_rows > most_rows:
        return {"IS_DEPENDENT": False}  # an interpreted or traced launch takes no such option
    is_dependent = torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
    return {"IS_DEPENDENT": True, "launch_pdl": True} if is_dependent else {"IS_DEPENDENT": False}


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
