"""Scales sums of products that are computed in 8 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.linear import WORD_BLOCK

SCALE_BLOCK: tl.constexpr = tl.constexpr(WORD_BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def scales_of_rows(  # type: ignore[no-untyped-def]
    scales, rows, is_row, start, num_rows, ROWS: tl.constexpr
):
    """Returns the scales `[T]` of rows in 8 bits for columns from `start` on, all in one block; 0
    where not `is_row`, or if ROWS, see `linear.scale_rows`, is 0.

    Args:
        scales: `[K / 128, num_rows]`.
    """
    if ROWS > 0:
        place = scales + start // SCALE_BLOCK * num_rows + rows
        factors = tl.load(place, mask=is_row, other=0.0)
    else:
        factors = 0.0
    return factors


@triton.jit  # type: ignore[untyped-decorator]
def scales_of_channels(  # type: ignore[no-untyped-def]
    scales, channels, first, start, depth, ROWS: tl.constexpr, IS_GATED: tl.constexpr
):
    """Returns the scales of channels `[N]` of a tile for columns from `start` on, all in one block;
    one number if the tile has one scale, and 0 if ROWS, see `linear.scale_rows`, is 0.

    Args:
        first: the first channel. Unless IS_GATED, ROWS channels that share a scale hold the tile.
    """
    num_blocks = tl.cdiv(depth, SCALE_BLOCK)
    if ROWS == 0:
        factors = 0.0
    elif ROWS == 1 or IS_GATED:
        factors = tl.load(scales + channels // ROWS * num_blocks + start // SCALE_BLOCK)
    else:
        factors = tl.load(scales + first // ROWS * num_blocks + start // SCALE_BLOCK)
    return factors


@triton.jit  # type: ignore[untyped-decorator]
def with_scaled_block(  # type: ignore[no-untyped-def]
    total, block, of_channels, of_rows, ROWS: tl.constexpr, IS_GATED: tl.constexpr,
    ROW_DIM: tl.constexpr,
):  # fmt: skip
    """Adds the sums of a block, times the scales of channels, see `scales_of_channels`, and of rows
    `[T]`, which are dimension ROW_DIM of `block`, to `total`. Without scales (ROWS is 0), `block`
    is the new total already."""
    if ROWS > 1 and not IS_GATED:
        factors = tl.expand_dims(of_rows * of_channels, 1 - ROW_DIM)
        result = tl.fma(block.to(tl.float32), tl.broadcast_to(factors, block.shape), total)
    elif ROWS > 0:
        factors = tl.expand_dims(of_rows, 1 - ROW_DIM) * tl.expand_dims(of_channels, ROW_DIM)
        result = tl.fma(block.to(tl.float32), factors, total)
    else:
        result = block
    return result


@triton.jit  # type: ignore[untyped-decorator]
def scaled(part, factors, others, IS_SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns sums `[N, M]` times factors `[N]` and `[M]`, if they have any."""
    return part.to(tl.float32) * (factors[:, None] * others[None, :]) if IS_SCALED else part
