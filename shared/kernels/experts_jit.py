"""Triton kernels of products with experts; see `shared.kernels.experts`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def multiply_tiles(  # type: ignore[no-untyped-def]
    inputs, weight, scales, bias, results, tile_pairs, tile_experts,
    num_pairs, num_channels, depth, input_stride, num_shared,
    NUM_EXPERTS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """One program a tile of pairs and some channels of their expert, which it reads once.

    Sums run over the whole depth in one order, so a pair's bits do not depend on its tile.
    """
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile)
    if expert < NUM_EXPERTS:
        pairs = tl.load(tile_pairs + tile * ROWS + tl.arange(0, ROWS))
        is_pair = pairs < num_pairs
        channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        is_channel = channels < num_channels
        rows = inputs + (pairs // num_shared) * input_stride
        columns = weight + (expert * num_channels + channels.to(tl.int64)) * depth
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in range(0, depth, DEPTH):
            places = start + tl.arange(0, DEPTH)
            is_deep = places < depth
            left = tl.load(
                rows[:, None] + places[None, :],
                mask=is_pair[:, None] & is_deep[None, :], other=0.0,
            )  # fmt: skip
            right = tl.load(
                columns[None, :] + places[:, None],
                mask=is_channel[None, :] & is_deep[:, None], other=0.0,
            ).to(left.dtype)  # fmt: skip
            if IS_FLOAT32:
                total = tl.dot(left, right, total, input_precision="ieee")
            else:
                total = tl.dot(left, right, total)
        if HAS_SCALES:
            factors = tl.load(scales + expert * num_channels + channels, mask=is_channel, other=0.0)
            total *= factors[None, :]
        if HAS_BIAS:
            added = tl.load(bias + expert * num_channels + channels, mask=is_channel, other=0.0)
            total += added.to(tl.float32)[None, :]
        tl.store(
            results + pairs[:, None] * num_channels + channels[None, :], total,
            mask=is_pair[:, None] & is_channel[None, :],
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def add_weighted(  # type: ignore[no-untyped-def]
    pairs, weights, results, num_columns, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the pairs of a row; one program a row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        pair = row * NUM_CHOSEN + choice
        values = tl.load(pairs + pair * num_columns + columns, mask=is_column, other=0.0)
        total += values.to(tl.float32) * tl.load(weights + pair)
    tl.store(results + row * num_columns + columns, total, mask=is_column)
