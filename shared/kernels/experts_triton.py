"""Triton kernels of products with experts; see `shared.kernels.experts`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.dependent_jit import begin, early, fetch_rows
from shared.kernels.experts import ExpertTiles, ExpertWeight
from shared.kernels.fused_jit import silu_times
from shared.kernels.launch import bytes_ahead, dependent_launch
from shared.kernels.linear import MAX_SEGMENT, WORD_BLOCK, Segments, scale_rows
from shared.kernels.pointwise import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, Partials
from shared.kernels.quantised import quantised_rows
from shared.kernels.scaled_jit import (
    SCALE_BLOCK,
    scaled,
    scales_of_channels,
    scales_of_rows,
    with_scaled_block,
)

_ALPHA: tl.constexpr = tl.constexpr(SWIGLU_ALPHA)
_LIMIT: tl.constexpr = tl.constexpr(SWIGLU_LIMIT)
# `exp` of it fits in float32, and adding 1 does not change it.
_MOST_EXPONENT: tl.constexpr = tl.constexpr(80.0)

# The most pairs that one program of `lay_tiles` counts.
MOST_PAIRS = 4096
# Pairs that every program of a product reads to find its own: those of one row, or the most for
# which this is faster than one more kernel.
_FEW_PAIRS, MOST_FOUND = 16, 128
_COUNT_CHUNK = 32
_SUM_BLOCK = 1024
_GATES = {
    None: 0,
    Activation.SILU: 1,
    Activation.GELU_TANH: 2,
    Activation.CLAMPED_SWIGLU: 3,
}


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])  # type: ignore[untyped-decorator]
def lay_tiles(  # type: ignore[no-untyped-def]
    experts, tile_pairs, tile_experts, num_pairs, num_tiles,
    NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_TILES: tl.constexpr, CHUNK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Lays the tiles of one expert: counts the pairs of all, and places the expert's in order."""
    begin(IS_DEPENDENT)
    own = tl.program_id(0)
    ids, tiles = tl.arange(0, BLOCK_EXPERTS), tl.arange(0, BLOCK_TILES)
    counts = tl.zeros((BLOCK_EXPERTS,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        some = start + tl.arange(0, CHUNK)
        chosen = tl.load(experts + some, mask=some < num_pairs, other=NUM_EXPERTS).to(tl.int32)
        counts += tl.sum((ids[:, None] == chosen[None, :]).to(tl.int32), 1)
    # NUM_EXPERTS stands for pairs past the end, which do not count.
    counts = tl.where(ids < NUM_EXPERTS, counts, 0)
    tile_counts = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(ids < own, tile_counts, 0), 0)
    num_own_tiles = tl.sum(tl.where(ids == own, tile_counts, 0), 0)
    num_own = tl.sum(tl.where(ids == own, counts, 0), 0)
    tl.store(tile_experts + first + tiles, own.to(tl.int64), mask=tiles < num_own_tiles)
    if own == 0:
        places = tl.sum(tile_counts, 0) + tiles
        tl.store(tile_experts + places, NUM_EXPERTS, mask=places < num_tiles)
    if num_own > 0:
        pairs = tl.arange(0, BLOCK_PAIRS)
        chosen = tl.load(experts + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
        is_own = chosen == own
        place = first * ROWS + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(tile_pairs + place, pairs.to(tl.int64), mask=is_own)
        padding = num_own + tl.arange(0, ROWS)
        is_padding = padding < num_own_tiles * ROWS
        tl.store(tile_pairs + first * ROWS + padding, num_pairs, mask=is_padding)


@triton.jit(do_not_specialize=["num_pairs", "num_shared"])  # type: ignore[untyped-decorator]
def multiply_tiles(  # type: ignore[no-untyped-def]
    inputs, row_scales, weight, scales, bias, factors, results, like, tile_pairs, tile_experts,
    num_pairs, input_stride, num_shared,
    NUM_EXPERTS: tl.constexpr, NUM_CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, AHEAD: tl.constexpr,
    HAS_SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, IS_8_BIT: tl.constexpr,
    SEGMENT: tl.constexpr, NUM_SEGMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, NUM_PARTS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_CHANNELS: tl.constexpr, STEP: tl.constexpr,
    IS_FLOAT32: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiplies one tile of pairs with some channels of their expert, which are read once.

    The weight is the left operand, as in `batch_invariant_triton`: sums run over the whole depth in
    one order, so a pair's bits depend neither on its tile nor on the size of tiles.

    Args:
        row_scales: of rows in 8 bits, `[T]`; or `[K / 128, T]` if SCALE_ROWS is not 0.
        like: has the type to which products are rounded.
        BLOCK_PAIRS: at least num_pairs, if `tile_experts` are the experts of the pairs and each
            program finds its own pairs, see `found_tile`; else 0.
        AHEAD: bytes of each channel to prefetch while the kernel before this one runs, which
            should not be the one that writes `tile_experts`; 0 prefetches none. Not with GATE.
        SCALE_ROWS: see `scale_rows`; 0 if a channel has one scale, or without HAS_SCALES.
        IS_8_BIT: rows and weights are int8 or e4m3.
        SEGMENT: columns whose products are added before their sum is scaled.
        GATE: the activation of gates, see `gated_values`; the first half of the channels are gates
            of the second half. 0 gates nothing.
        NUM_PARTS: k, to write pairs as parts `[k, T, N]` float32 of their row, times `factors`
            `[T, k]`; 0 writes `[T * k, N]`.
    """
    tile = tl.program_id(1)
    num_results: tl.constexpr = NUM_CHANNELS // 2 if GATE else NUM_CHANNELS
    tile_results: tl.constexpr = TILE_CHANNELS // 2 if GATE else TILE_CHANNELS
    first = tl.program_id(0) * tile_results
    if AHEAD > 0:
        fetch_channels(
            weight, tile_experts + tile, first, NUM_EXPERTS, NUM_CHANNELS, TILE_CHANNELS,
            DEPTH, AHEAD,
        )  # fmt: skip
    begin(IS_DEPENDENT)
    expert, pairs = tile_of(
        tile_pairs, tile_experts, tile, num_pairs, NUM_EXPERTS, BLOCK_PAIRS, TILE_ROWS
    )
    if expert < NUM_EXPERTS:
        is_pair = pairs < num_pairs
        lanes = tl.arange(0, TILE_CHANNELS)
        # Channels past the end repeat the first ones: cheaper than masks on every load.
        channels = (first + lanes % tile_results) % num_results
        channels += lanes // tile_results * num_results
        own_rows, num_inputs = pairs // num_shared, num_pairs // num_shared
        rows = inputs + own_rows[None, :] * input_stride
        sources = weight + (expert * NUM_CHANNELS + channels)[:, None] * DEPTH
        is_input = is_pair[None, :]
        # Scales, bias and factors, which are needed at the end, are loaded early.
        has_channel_scales: tl.constexpr = HAS_SCALES and SCALE_ROWS == 0
        is_by_segment: tl.constexpr = IS_8_BIT and SCALE_ROWS == 0
        own_scales = early(
            scales + expert * NUM_CHANNELS + channels, lanes >= 0, has_channel_scales
        )
        own_row_scales = early(row_scales + own_rows, is_pair, is_by_segment)
        own_bias = early(bias + expert * NUM_CHANNELS + channels, lanes >= 0, HAS_BIAS)
        own_factors = early(factors + pairs, is_pair, NUM_PARTS > 0)
        block_scales = scales
        if SCALE_ROWS > 0:
            num_scale_rows: tl.constexpr = (NUM_CHANNELS + SCALE_ROWS - 1) // SCALE_ROWS
            block_scales += expert * num_scale_rows * tl.cdiv(DEPTH, SCALE_BLOCK)
        sum_type: tl.constexpr = tl.int32 if inputs.dtype.element_ty == tl.int8 else tl.float32
        total = tl.zeros((TILE_CHANNELS, TILE_ROWS), tl.float32)
        for segment in tl.static_range(NUM_SEGMENTS):
            part = tl.zeros(total.shape, tl.float32 if SCALE_ROWS > 0 else sum_type)
            end = (segment + 1) * SEGMENT if (segment + 1) * SEGMENT < DEPTH else DEPTH
            for start in range(segment * SEGMENT, end, STEP):
                left, right = operands(sources, rows, is_input, start, DEPTH, STEP)
                # If blocks have scales, the sum over a step is scaled before it is added.
                before = tl.zeros(part.shape, sum_type) if SCALE_ROWS > 0 else part
                of_channels = scales_of_channels(
                    block_scales, channels, first, start, DEPTH, SCALE_ROWS,
                    GATE > 0 or not IS_8_BIT,
                )  # fmt: skip
                if IS_8_BIT:
                    block = tl.dot(left, right, before, out_dtype=sum_type)
                    of_rows = scales_of_rows(
                        row_scales, own_rows, is_pair, start, num_inputs, SCALE_ROWS
                    )
                    part = with_scaled_block(
                        part, block, of_channels, of_rows, SCALE_ROWS, GATE > 0, 1
                    )
                else:
                    left = left.to(right.dtype)
                    if IS_FLOAT32:
                        block = tl.dot(left, right, before, input_precision="ieee")
                    else:
                        block = tl.dot(left, right, before)
                    part = tl.fma(block, of_channels[:, None], part) if SCALE_ROWS > 0 else block
            total += scaled(part, own_scales, own_row_scales, is_by_segment)
        if has_channel_scales and not IS_8_BIT:
            total *= own_scales[:, None]
        if HAS_BIAS:
            total += own_bias[:, None]
        columns = first + tl.arange(0, tile_results)
        is_result = is_pair[:, None] & (columns < num_results)[None, :]
        dtype = like.dtype.element_ty
        if GATE:
            halves = tl.reshape(total, (2, tile_results, TILE_ROWS))
            gates, gated = tl.split(tl.permute(halves, (2, 1, 0)))
            values = gated_values(gates.to(dtype), gated.to(dtype), GATE)
        else:
            # Rounded like products that another kernel reads.
            values = tl.trans(total).to(dtype)
        places = pairs
        if NUM_PARTS > 0:
            values = values.to(tl.float32) * own_factors[:, None]
            num_rows = (num_pairs // NUM_PARTS).to(tl.int64)
            places = pairs % NUM_PARTS * num_rows + pairs // NUM_PARTS
        tl.store(results + places[:, None] * num_results + columns[None, :], values, mask=is_result)


@triton.jit  # type: ignore[untyped-decorator]
def operands(sources, rows, is_input, start, DEPTH: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads STEP columns, from `start` on, of channels `[C, 1]` and rows `[1, R]`; returns `[C,
    STEP]` and `[STEP, R]`, with zeros past the depth and where not `is_input`."""
    columns = start + tl.arange(0, STEP)
    left_places, right_places = sources + columns[None, :], rows + columns[:, None]
    if DEPTH % STEP == 0:
        left = tl.load(left_places)
        right = tl.load(right_places, mask=is_input, other=0.0)
    else:
        is_deep = columns < DEPTH
        left = tl.load(left_places, mask=is_deep[None, :], other=0.0)
        right = tl.load(right_places, mask=is_input & is_deep[:, None], other=0.0)
    return left, right


@triton.jit  # type: ignore[untyped-decorator]
def fetch_channels(  # type: ignore[no-untyped-def]
    weight, expert, first, NUM_EXPERTS: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Prefetches AHEAD bytes of TILE channels of an expert into L2."""
    # A wrong expert would only prefetch useless bytes, so it may be read before `begin`.
    own = tl.load(expert, cache_modifier=".cg")
    is_whole = first + TILE <= NUM_CHANNELS
    if (own >= 0) & (own < NUM_EXPERTS) & is_whole:
        source = weight + (own * NUM_CHANNELS + first) * WIDTH
        bytes_each: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        fetch_rows(source, TILE, WIDTH * bytes_each, AHEAD)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(  # type: ignore[no-untyped-def]
    tile_pairs, tile_experts, tile, num_pairs,
    NUM_EXPERTS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Returns the expert of a tile and its pairs `[ROWS]`: from `lay_tiles`, or found here."""
    if BLOCK_PAIRS > 0:
        expert, pairs = found_tile(tile_experts, tile, num_pairs, NUM_EXPERTS, BLOCK_PAIRS, ROWS)
    else:
        expert = tl.load(tile_experts + tile)
        pairs = tl.load(tile_pairs + tile * ROWS + tl.arange(0, ROWS))
    return expert, pairs


@triton.jit  # type: ignore[untyped-decorator]
def found_tile(  # type: ignore[no-untyped-def]
    experts, pair, num_pairs, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Returns the expert of a pair, NUM_EXPERTS if the pair begins no tile, and the pairs `[ROWS]`
    of its tile, padded with num_pairs. Every ROWS-th pair of an expert begins a tile."""
    others = tl.arange(0, BLOCK)
    chosen = tl.load(experts + others, mask=others < num_pairs, other=NUM_EXPERTS)
    expert = tl.load(experts + pair)
    is_own = chosen == expert
    num_before = tl.sum((is_own & (others < pair)).to(tl.int32), 0)
    ranks = tl.cumsum(is_own.to(tl.int32), 0) - 1 - num_before
    places = tl.arange(0, ROWS)
    is_there = is_own[:, None] & (ranks[:, None] == places[None, :])
    # At most one pair is there for each place.
    missing = tl.where(is_there, num_pairs - others[:, None], 0)
    pairs = (num_pairs - tl.sum(missing, 0)).to(tl.int64)
    return tl.where(num_before % ROWS == 0, expert, NUM_EXPERTS), pairs


@triton.jit  # type: ignore[untyped-decorator]
def gated_values(gates, values, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns `pointwise.gate_mul`. GATE: 1 SILU, 2 GELU_TANH, 3 CLAMPED_SWIGLU."""
    if GATE == 1:
        result = silu_times(gates, values)
    else:
        gate, value = gates.to(tl.float32), values.to(tl.float32)
        if GATE == 2:
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            activated = gate / (1.0 + tl.exp(tl.minimum(-inner, _MOST_EXPONENT)))
        else:
            gate = tl.minimum(gate, _LIMIT)
            value = tl.minimum(tl.maximum(value, -_LIMIT), _LIMIT) + 1.0
            activated = gate / (1.0 + tl.exp(tl.minimum(-gate * _ALPHA, _MOST_EXPONENT)))
        result = (activated * value).to(gates.dtype)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def add_weighted(  # type: ignore[no-untyped-def]
    pairs, weights, more, results, num_columns, NUM_CHOSEN: tl.constexpr,
    HAS_MORE: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds BLOCK columns of the weighted pairs of a row, and then those of `more`."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        pair = row * NUM_CHOSEN + choice
        values = tl.load(pairs + pair * num_columns + columns, mask=is_column, other=0.0)
        weight = tl.load(weights + pair)
        # Pairs without weight may never have been written.
        total += tl.where(weight != 0.0, values.to(tl.float32) * weight, 0.0)
    place = row * num_columns + columns
    if HAS_MORE:
        own = tl.load(more + place, mask=is_column, other=0.0)
        total = total.to(own.dtype).to(tl.float32) + own.to(tl.float32)
    tl.store(results + place, total, mask=is_column)


@dataclass(frozen=True, slots=True)
class TileShape:
    """Launch parameters of a product for a given number of rows per tile.

    Attributes:
        step: columns that are multiplied at once.
    """

    channels: int
    step: int
    num_warps: int
    num_stages: int


# As in `batch_invariant_triton`, whose products of few rows are similar.
TILE_SHAPES = {
    16: TileShape(64, 128, 4, 4),
    32: TileShape(64, 128, 4, 4),
    64: TileShape(128, 64, 4, 4),
    128: TileShape(128, 64, 8, 4),
}
# In 8 bits, measured on an H100 with the experts of GLM-4.5-Air.
_SHAPES_8_BIT = {
    16: TileShape(64, WORD_BLOCK, 4, 6),
    32: TileShape(64, WORD_BLOCK, 4, 4),
    64: TileShape(128, WORD_BLOCK, 4, 3),
    128: TileShape(128, WORD_BLOCK, 4, 3),
}
# Where blocks have scales: their sums need registers of their own. With those of DeepSeek-V3.
_MOST_ROWS_OF_BLOCKS = TileShape(64, WORD_BLOCK, 4, 4)
_FLOAT32_SHAPE = TileShape(32, 32, 4, 2)


def tile_shape(num_rows: int, dtype: torch.dtype, *, has_blocks: bool) -> TileShape:
    """Returns the launch parameters for tiles of so many rows in a type."""
    if dtype is torch.float32:
        return _FLOAT32_SHAPE
    if dtype.itemsize > 1:
        return TILE_SHAPES[num_rows]
    is_large = num_rows == max(_SHAPES_8_BIT)
    return _MOST_ROWS_OF_BLOCKS if has_blocks and is_large else _SHAPES_8_BIT[num_rows]


def laid_tiles(experts: Tensor, num_experts: int, num_rows: int, num_tiles: int) -> ExpertTiles:
    """Sorts up to `MOST_PAIRS` pairs as `plain_tiles` does."""
    num_pairs = len(experts)
    pairs = experts.new_empty(num_tiles * num_rows)
    tile_experts = experts.new_empty(num_tiles)
    lay_tiles[(num_experts,)](
        experts, pairs, tile_experts, num_pairs, num_tiles,
        NUM_EXPERTS=num_experts, ROWS=num_rows,
        BLOCK_PAIRS=triton.next_power_of_2(num_pairs),
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_TILES=triton.next_power_of_2(num_tiles), CHUNK=_COUNT_CHUNK,
        num_warps=4, **dependent_launch(experts.device, num_pairs // 8),
    )  # fmt: skip
    return ExpertTiles(pairs, tile_experts, num_rows)


def fused_expert_product(
    inputs: Tensor, experts: Tensor, weight: ExpertWeight, tiles: ExpertTiles | None
) -> Tensor:
    return fused_gated_product(inputs, experts, weight, tiles, None)


def fused_gated_product(
    inputs: Tensor,
    experts: Tensor,
    weight: ExpertWeight,
    tiles: ExpertTiles | None,
    activation: Activation | None,
) -> Tensor:
    """As `gated_product`; without an activation nothing is gated."""
    assert weight.values is not None
    assert tiles is not None
    num_pairs = experts.numel()
    num_channels = weight.values.shape[1] // (1 if activation is None else 2)
    results = inputs.new_empty((num_pairs, num_channels))
    num_shared = num_pairs // len(inputs)
    _launch(inputs, num_shared, weight, tiles, num_pairs, results, activation, None)
    return results


def tiled_parts(
    inputs: Tensor, weight: ExpertWeight, tiles: ExpertTiles, weights: Tensor
) -> Partials:
    """Returns `weighted_sum` of `expert_product` as `Partials`, whose total has the same bits.

    Args:
        inputs: `[P, K]`, one row per pair.
        weights: `[T, k]` float32.
    """
    assert weight.values is not None
    num_rows, num_chosen = weights.shape
    shape = (num_chosen, num_rows, weight.values.shape[1])
    parts = inputs.new_empty(shape, dtype=torch.float32)
    _launch(inputs, 1, weight, tiles, len(inputs), parts, None, weights)
    return Partials(parts, inputs.dtype)


def _launch(
    inputs: Tensor,
    num_shared: int,
    weight: ExpertWeight,
    tiles: ExpertTiles,
    num_pairs: int,
    results: Tensor,
    activation: Activation | None,
    factors: Tensor | None,
) -> None:
    values, scales, bias, like = weight.values, weight.scales, weight.bias, inputs
    assert values is not None
    assert values.is_contiguous()
    assert scales is None or scales.is_contiguous()
    assert inputs.stride(1) == 1
    num_experts, num_channels, depth = values.shape
    is_found = tiles.pairs is None
    num_scale_rows = 0 if scales is None else scale_rows(scales, num_channels)
    is_float32, row_scales = inputs.dtype is torch.float32, results
    is_8_bit = weight.rounds_rows and not is_float32
    num_segments = 1
    if is_8_bit:
        inputs, row_scales = quantised_rows(inputs, values.dtype, is_by_block=num_scale_rows > 0)
        num_segments = triton.cdiv(depth, MAX_SEGMENT[values.dtype])
    segments = Segments.of(depth, num_segments)
    shape = tile_shape(tiles.num_rows, inputs.dtype, has_blocks=num_scale_rows > 0)
    tile_results = shape.channels // (1 if activation is None else 2)
    grid = triton.cdiv(num_channels, shape.channels), len(tiles.experts)
    launch = dependent_launch(inputs.device, num_pairs // 8)
    ahead = 0
    if activation is None and launch["IS_DEPENDENT"]:
        ahead = bytes_ahead(depth * values.itemsize, grid[1] * num_channels)
    if activation is not None:
        grid = triton.cdiv(num_channels // 2, tile_results), len(tiles.experts)
    multiply_tiles[grid](
        inputs, row_scales, values, results if scales is None else scales,
        results if bias is None else bias, results if factors is None else factors, results, like,
        tiles.experts if tiles.pairs is None else tiles.pairs, tiles.experts,
        num_pairs, inputs.stride(0), num_shared,
        NUM_EXPERTS=num_experts, NUM_CHANNELS=num_channels, DEPTH=depth,
        BLOCK_PAIRS=0 if not is_found else _FEW_PAIRS if num_pairs <= _FEW_PAIRS else MOST_FOUND,
        AHEAD=ahead,
        HAS_SCALES=scales is not None, SCALE_ROWS=num_scale_rows, IS_8_BIT=is_8_bit,
        SEGMENT=segments.length, NUM_SEGMENTS=segments.count, HAS_BIAS=bias is not None,
        GATE=_GATES[activation], NUM_PARTS=0 if factors is None else factors.shape[1],
        TILE_ROWS=tiles.num_rows, TILE_CHANNELS=shape.channels,
        STEP=shape.step, IS_FLOAT32=is_float32, num_warps=shape.num_warps,
        num_stages=shape.num_stages, enable_fp_fusion=not is_8_bit, **launch,
    )  # fmt: skip


def fused_weighted_sum(pairs: Tensor, weights: Tensor, more: Tensor | None = None) -> Tensor:
    num_rows, num_chosen = weights.shape
    num_columns = pairs.shape[1]
    results = pairs.new_empty((num_rows, num_columns))
    block = min(_SUM_BLOCK, triton.next_power_of_2(num_columns))
    assert more is None or more.is_contiguous()
    if num_rows:
        add_weighted[(num_rows, triton.cdiv(num_columns, block))](
            pairs, weights.contiguous(), pairs if more is None else more, results, num_columns,
            NUM_CHOSEN=num_chosen, HAS_MORE=more is not None, BLOCK=block, num_warps=4,
            **dependent_launch(pairs.device, num_rows),
        )  # fmt: skip
    return results
