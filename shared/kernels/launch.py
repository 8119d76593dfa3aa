"""What launches of small kernels share: no idle time between them, and aligned outputs.

In a decode step of few rows a kernel runs for two microseconds, and getting it started takes about
one. A *dependent* kernel is put on the multiprocessors before its predecessor has ended, and waits
there (`dependent_jit.begin`). Hopper and later have it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")
_Other = TypeVar("_Other")
_FIRST_CAPABILITY = (9, 0)
# Measured on an H200 with an 8B decoder: a forward of 1 or 8 rows takes 2 % less, one of 64 rows
# 1 % more, because waiting programs hold places that running ones could use.
_MAX_ROWS = 32

_ALIGNMENT = 16
# Of weights that are fetched ahead, and of the shortest worthwhile piece. As much as a product has
# under way at its start: with more, the kernel that runs meanwhile waits for its own few bytes.
_MOST_AHEAD = 8 * 2**20
_FEWEST_AHEAD = 128


def dependent_launch(
    device: torch.device, num_rows: int, *, most_rows: int = _MAX_ROWS
) -> dict[str, bool]:
    """Returns the launch options of a kernel that calls `begin(IS_DEPENDENT)`.

    Args:
        num_rows: rows of the forward; where a program takes several, those that one takes count
            as one.
        most_rows: with which it pays.
    """
    if device.type != "cuda" or num_rows > most_rows:
        return {"IS_DEPENDENT": False}  # an interpreted launch takes no such option
    is_dependent = torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
    return {"IS_DEPENDENT": True, "launch_pdl": True} if is_dependent else {"IS_DEPENDENT": False}


def bytes_ahead(row_bytes: int, num_rows: int) -> int:
    """Returns how many bytes of each row of a weight a dependent kernel fetches before it begins;
    see `dependent_jit.fetch_rows`.

    Args:
        row_bytes: that a program reads of a row.
        num_rows: that all programs together read.
    """
    most = min(row_bytes, _MOST_AHEAD // num_rows) // _FEWEST_AHEAD * _FEWEST_AHEAD
    return most if row_bytes % (2 * _ALIGNMENT) == 0 else 0


def side_by_side(
    device: torch.device, num_rows: int, first: Callable[[], _Result], other: Callable[[], _Other]
) -> tuple[_Result, _Other]:
    """Returns the results of both, which know nothing of each other.

    In a CUDA graph of few rows they run at the same time: small kernels leave the memory idle,
    where a product would read its weight.
    """
    if (
        device.type != "cuda"
        or num_rows > _MAX_ROWS
        or not torch.cuda.is_current_stream_capturing()
    ):
        return first(), other()
    stream, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        beside = other()
    result = first()
    # Its memory is used again on the same stream alone, after it has waited for this one.
    stream.wait_stream(side)
    return result, beside


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


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
