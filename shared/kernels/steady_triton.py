"""Launches the products of `steady`; the kernel is in `steady_jit`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.kernels.steady import MAX_ROW_TILES, TILE_CHANNELS, WORD_BLOCK, SteadyOperand
from shared.kernels.steady_jit import product

# Segments are cut until about this many programs stream the weight, and no shorter than this.
# Constants, because bits depend on them: not the device at hand.
_WANTED_PROGRAMS = 256
_SHORTEST_SEGMENT = 512
_ROW_TILES = (16, 32, 64)
_WIDE_TILE = 128


def launch(inputs: Tensor, weight: SteadyOperand, bias: Tensor | None) -> Tensor:
    """Computes `steady.steady_linear`."""
    values, scales = weight.values, weight.scales
    num_rows, depth = inputs.shape
    num_channels = values.shape[0]
    assert depth % WORD_BLOCK == 0
    assert inputs.stride(1) == 1
    assert values.is_contiguous()
    results = inputs.new_empty(num_rows, num_channels)
    if not num_rows:
        return results
    segment, num_segments = _segments(num_channels, depth)
    is_wide = num_rows > MAX_ROW_TILES * _WIDE_TILE
    is_spread = num_segments > 1 and not is_wide
    tile_channels = _WIDE_TILE if is_wide else TILE_CHANNELS
    tile_rows = next((rows for rows in _ROW_TILES if rows >= num_rows), _WIDE_TILE)
    tiles = (triton.cdiv(num_channels, tile_channels), triton.cdiv(num_rows, tile_rows))
    parts = results
    if is_spread:
        parts = inputs.new_empty((num_segments, *results.shape), dtype=torch.float32)
    product[(*tiles, num_segments if is_spread else 1)](
        inputs, values if scales is None else values.view(torch.int32),
        results if scales is None else scales, results if bias is None else bias,
        results, parts, weight.counters, num_rows, inputs.stride(0),
        NUM_CHANNELS=num_channels, DEPTH=depth, SEGMENT=segment, NUM_SEGMENTS=num_segments,
        IS_SPREAD=is_spread, IS_WIDE=scales is None,
        IS_E4M3=values.dtype is torch.float8_e4m3fn,
        HAS_BIAS=bias is not None, TILE_CHANNELS=tile_channels, TILE_ROWS=tile_rows,
        QUARTER=WORD_BLOCK // 4, num_warps=8 if is_wide else 4,
        num_stages=3 if tile_rows == _WIDE_TILE else 4,
    )  # fmt: skip
    return results


def _segments(num_channels: int, depth: int) -> tuple[int, int]:
    """Returns length and number of the segments of K, which depend on the weight's shape alone."""
    wanted = _WANTED_PROGRAMS // triton.cdiv(num_channels, TILE_CHANNELS)
    count = max(1, min(wanted, depth // _SHORTEST_SEGMENT))
    length = triton.cdiv(triton.cdiv(depth, count), WORD_BLOCK) * WORD_BLOCK
    return length, triton.cdiv(depth, length)
