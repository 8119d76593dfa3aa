"""Helpers for launches of small kernels: dependent launch, concurrent streams, aligned outputs.

In a decode step of few rows a kernel runs for two microseconds, and its start takes about one. With
programmatic dependent launch, a *dependent* kernel is placed on the multiprocessors before its
predecessor has ended, and waits there (`dependent_jit.begin`). Hopper and later support it."""

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
# 1 % more, because waiting programs occupy multiprocessors that running ones could use.
_MAX_ROWS = 32

_ALIGNMENT = 16
# The most bytes of weights to prefetch: as many as a product has in flight at its start. With more,
# the kernel that still runs waits for its own few bytes.
_MAX_AHEAD = 8 * 2**20
# The smallest piece that is worth a prefetch, in bytes.
_MIN_AHEAD = 128


def dependent_launch(
    device: torch.device, num_rows: int, *, most_rows: int = _MAX_ROWS
) -> dict[str, bool]:
    """Returns the launch options of a kernel that calls `begin(IS_DEPENDENT)`.

    Args:
        num_rows: rows of the forward; where a program takes several rows, the number of programs.
        most_rows: the most rows with which dependent launch pays.
    """
    if device.type != "cuda" or num_rows > most_rows:
        return {"IS_DEPENDENT": False}  # the interpreter does not accept `launch_pdl`
    is_dependent = torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
    return {"IS_DEPENDENT": True, "launch_pdl": True} if is_dependent else {"IS_DEPENDENT": False}


def bytes_ahead(row_bytes: int, num_rows: int) -> int:
    """Returns how many bytes of each row of a weight a dependent kernel prefetches before it
    begins; see `dependent_jit.fetch_rows`.

    Args:
        row_bytes: bytes of a row that a program reads.
        num_rows: rows that all programs together read.
    """
    size = min(row_bytes, _MAX_AHEAD // num_rows) // _MIN_AHEAD * _MIN_AHEAD
    return size if row_bytes % (2 * _ALIGNMENT) == 0 else 0


def side_by_side(
    device: torch.device, num_rows: int, first: Callable[[], _Result], other: Callable[[], _Other]
) -> tuple[_Result, _Other]:
    """Returns the results of two independent computations.

    In a CUDA graph of few rows they run on two streams at the same time: while small kernels leave
    the memory idle, a product of the other stream can read its weight.
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
        other_result = other()
    result = first()
    # The result's memory is only reused on the side stream, after that has waited for this one.
    stream.wait_stream(side)
    return result, other_result


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def empties(
    count: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Returns `count` contiguous tensors of one shape with undefined elements, 16-byte aligned.

    Triton compiles a kernel once for each pattern of aligned pointers. If the tensors of one
    allocation followed each other without padding, they would be aligned for some sizes only, and
    the first request with another pattern would wait for the compiler.
    """
    size = torch.Size(shape).numel()
    per_line = _ALIGNMENT // dtype.itemsize
    padded = size + -size % per_line
    rows = torch.empty((count, padded), dtype=dtype, device=device)
    return tuple(row[:size].view(*shape) for row in rows.unbind())
