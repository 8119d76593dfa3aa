"""Launches the products of `steady`; the kernel is in `steady_jit`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shared.kernels.dependent import dependent_launch
from shared.kernels.partials import Partials
from shared.kernels.steady import (
    MAX_ROW_TILES,
    MOST_FEW_ROWS,
    TILE_CHANNELS,
    WORD_BLOCK,
    SteadyOperand,
)
from shared.kernels.steady_jit import product

# Segments are halved up to this many programs that stream the weight, and no shorter than this.
# Constants, because bits depend on them: not the device at hand.
_MOST_PROGRAMS = 256
_SHORTEST_SEGMENT = 512
_ROW_TILES = (16, 32, 64)
_WIDE_TILE = 128
# Tiles of weight and rows under way: as many as leave room for three programs a multiprocessor.
_STAGES = {16: 4, 32: 4, 64: 3, _WIDE_TILE: 3}
_WORD_STAGES = {16: 4, 32: 4, 64: 4, _WIDE_TILE: 3}


def launch(inputs: Tensor, weight: SteadyOperand, bias: Tensor | None) -> Tensor:
    """Computes `steady.steady_linear`."""
    results = inputs.new_empty(len(inputs), len(weight.values))
    segments = _segments(weight)
    is_spread = segments.count > 1 and not _is_wide(len(inputs))
    parts = (
        inputs.new_empty((segments.count, *results.shape), dtype=torch.float32)
        if is_spread
        else None
    )
    _launch(inputs, weight, bias, results, parts)
    return results


def launch_partials(inputs: Tensor, weight: SteadyOperand) -> Partials | None:
    """Computes `steady.steady_partials`."""
    segments = _segments(weight)
    if segments.count == 1 or _is_wide(len(inputs)) or weight.scales is not None:
        return None
    shape = segments.count, len(inputs), len(weight.values)
    parts = inputs.new_empty(shape, dtype=torch.float32)
    _launch(inputs, weight, None, parts, parts, leaves_parts=True)
    return Partials(parts, inputs.dtype)


def launch_gated(inputs: Tensor, weight: SteadyOperand) -> Tensor | None:
    """Computes `steady.steady_gated`."""
    # Measured: gating and dependent launches make products of 8 bits slower.
    if _segments(weight).count > 1 or weight.scales is not None:
        return None
    results = inputs.new_empty(len(inputs), len(weight.values) // 2)
    _launch(inputs, weight, None, results, None, is_gated=True)
    return results


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a product's depth: all but the last are `length` long."""

    length: int
    count: int


def _segments(weight: SteadyOperand) -> Segments:
    """Returns the segments of K, which depend on the weight's shape alone."""
    num_channels, depth = weight.values.shape
    num_tiles, count = triton.cdiv(num_channels, TILE_CHANNELS), 1
    while 2 * count * num_tiles <= _MOST_PROGRAMS and 2 * count * _SHORTEST_SEGMENT <= depth:
        count *= 2
    length = triton.cdiv(triton.cdiv(depth, count), WORD_BLOCK) * WORD_BLOCK
    return Segments(length, triton.cdiv(depth, length))


def _is_wide(num_rows: int) -> bool:
    """Whether there are rows enough to keep a device busy without cutting the depth."""
    return num_rows > MAX_ROW_TILES * _WIDE_TILE


def _launch(
    inputs: Tensor,
    weight: SteadyOperand,
    bias: Tensor | None,
    results: Tensor,
    parts: Tensor | None,
    *,
    leaves_parts: bool = False,
    is_gated: bool = False,
) -> None:
    values, scales = weight.values, weight.scales
    (num_rows, depth), num_channels = inputs.shape, values.shape[0]
    assert depth % WORD_BLOCK == 0
    assert inputs.stride(1) == 1
    assert values.is_contiguous()
    if not num_rows:
        return
    segments, is_wide = _segments(weight), _is_wide(num_rows)
    tile_channels = _WIDE_TILE if is_wide else TILE_CHANNELS
    tile_rows = next((rows for rows in _ROW_TILES if rows >= num_rows), _WIDE_TILE)
    stages = _STAGES if scales is None else _WORD_STAGES
    grid = triton.cdiv(num_channels, tile_channels), triton.cdiv(num_rows, tile_rows)
    product[(*grid, 1 if parts is None else segments.count)](
        inputs, values if scales is None else values.view(torch.int32),
        results if scales is None else scales, results if bias is None else bias,
        results, results if parts is None else parts, weight.counters,
        num_rows, inputs.stride(0),
        NUM_CHANNELS=num_channels, DEPTH=depth,
        SEGMENT=segments.length, NUM_SEGMENTS=segments.count,
        IS_SPREAD=parts is not None, LEAVES_PARTS=leaves_parts, IS_GATED=is_gated,
        IS_WIDE=scales is None, IS_E4M3=values.dtype is torch.float8_e4m3fn,
        HAS_BIAS=bias is not None, TILE_CHANNELS=tile_channels, TILE_ROWS=tile_rows,
        QUARTER=WORD_BLOCK // 4,
        num_warps=8 if is_wide else 4, num_stages=stages[tile_rows],
        **dependent_launch(
            inputs.device, num_rows, most_rows=MOST_FEW_ROWS if scales is None else 0
        ),
    )  # fmt: skip
