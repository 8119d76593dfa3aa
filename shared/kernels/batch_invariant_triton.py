"""Triton kernel of batch-invariant products, with weights in 8 or 16 bits.

The weight's tile is the left operand, so that a few rows of activations fill the short side of a
matrix instruction. int8 weights are widened in registers. e4m3 weights are multiplied with rows
that are rounded to e4m3, see `quantised.quantised_rows`. Every element of the result is summed
along K in steps of one fixed size, within segments of one fixed length, and the segments are added
in order. So its bits depend only on its own row and channel, whatever the tiles and however
programs share the work. Products of many rows are computed by `many_rows_triton`, with the same
bits, except those with an int8 weight.

Source: the last program of a tile adds the parts, as in stream-K, Osama et al., arXiv 2301.03598.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.dependent_jit import begin, early, fetch_rows
from shared.kernels.fused_jit import silu_times
from shared.kernels.launch import bytes_ahead, dependent_launch
from shared.kernels.linear import (
    MAX_ROW_TILES,
    MOST_FEW_ROWS,
    TILE_CHANNELS,
    WORD_BLOCK,
    BatchInvariantOperand,
)
from shared.kernels.many_rows_triton import (
    launch_many,
    launch_many_gated,
    launch_many_parts,
    pays_to_spread,
)
from shared.kernels.pointwise import Partials
from shared.kernels.quantised import quantised_rows
from shared.kernels.widened_jit import (
    block_factors,
    scaled,
    scales_of_channels,
    scales_of_rows,
    unpacked,
    with_block,
    with_e4m3_block,
)

_ROW_TILES = (16, 32, 64)
_WIDE_TILE = 128
# Tiles of weight and rows in flight: with these, three programs fit on a multiprocessor.
_STAGES = {16: 4, 32: 4, 64: 3}
_WORD_STAGES = {16: 6, 32: 4, 64: 4, _WIDE_TILE: 3}
_E4M3_STAGES = {16: 4, 32: 4, 64: 4}
# The most rows with which gating pays where blocks of e4m3 have scales.
_MOST_GATED_ROWS_IN_BLOCKS = 32
# The most rows of dependent launches with int8 weights; 0 is none.
_MOST_WORD_ROWS = 0


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]
    inputs, row_scales, weights, scales, bias, results, parts, counters,
    num_rows, input_stride,
    NUM_CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
    SEGMENT: tl.constexpr, NUM_SEGMENTS: tl.constexpr,
    IS_SPREAD: tl.constexpr, LEAVES_PARTS: tl.constexpr, IS_GATED: tl.constexpr,
    IS_WORDS: tl.constexpr, IS_E4M3: tl.constexpr, SCALE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr, TILE_ROWS: tl.constexpr, QUARTER: tl.constexpr,
    AHEAD: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes `results` `[T, N]`. If segments are spread over programs, these first write `parts`
    `[S, T, N]` float32.

    `counters` are zero before and after.

    Args:
        LEAVES_PARTS: another kernel adds the parts.
        row_scales: of rows in e4m3, `[T]`; or `[K / 128, T]` if SCALE_ROWS is not 0.
        IS_GATED: the first half of the channels are gates of the second half. A tile has equally
            many of both, and `results` are `[T, N / 2]`. There is one segment, and no bias.
        IS_WORDS: weights are words of four int8 numbers.
        IS_E4M3: rows and weights are e4m3.
        SCALE_ROWS: see `scale_rows`. The sum over a block is scaled before it is added to that of
            the blocks before it, and the sum of a segment of e4m3 before it is added to others.
        AHEAD: bytes of each channel's segment to prefetch while the kernel before this one runs; 0
            prefetches none.
    """
    tile = tl.program_id(0)
    row_tile = tl.program_id(1)
    width = DEPTH // 4 if IS_WORDS else DEPTH
    if AHEAD > 0:
        own: tl.constexpr = TILE_CHANNELS // 2 if IS_GATED else TILE_CHANNELS
        fetch_tile(
            weights, tile, SEGMENT, own, NUM_CHANNELS, DEPTH, AHEAD, IS_SPREAD, IS_WORDS, IS_E4M3,
            IS_GATED,
        )  # fmt: skip
    lanes = tl.arange(0, TILE_CHANNELS)
    channels = tile * TILE_CHANNELS + lanes
    if IS_GATED:
        half = TILE_CHANNELS // 2
        channels = tile * half + lanes % half + (lanes // half) * (NUM_CHANNELS // 2)
    # Scales and bias, which are needed at the end, are loaded early.
    is_channel = channels < NUM_CHANNELS
    is_scaled_last: tl.constexpr = IS_WORDS and SCALE_ROWS == 0
    is_scaled_by_segment: tl.constexpr = IS_E4M3 and SCALE_ROWS == 0
    own_scales = early(scales + channels, is_channel, is_scaled_last or is_scaled_by_segment)
    own_bias = early(bias + channels, is_channel, HAS_BIAS)
    begin(IS_DEPENDENT)
    rows = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = rows < num_rows
    is_result = is_row[:, None] & is_channel[None, :]
    # Channels past the end repeat the first ones: cheaper than masks on every load.
    repeated = channels % NUM_CHANNELS
    sources = weights + repeated.to(tl.int64)[:, None] * width
    quarter = tl.arange(0, QUARTER)
    whole = tl.arange(0, 4 * QUARTER)
    row_inputs = inputs + rows.to(tl.int64)[None, :] * input_stride
    is_input = is_row[None, :]
    own_row_scales = early(row_scales + rows, is_row, is_scaled_by_segment)
    total = tl.zeros([TILE_CHANNELS, TILE_ROWS], tl.float32)
    first = tl.program_id(2) if IS_SPREAD else 0
    last = first + 1 if IS_SPREAD else NUM_SEGMENTS
    for segment in range(first, last):
        part = tl.zeros([TILE_CHANNELS, TILE_ROWS], tl.float32)
        end = tl.minimum((segment + 1) * SEGMENT, DEPTH)
        for start in range(segment * SEGMENT, end, 4 * QUARTER):
            here = row_inputs + start + whole[:, None]
            if IS_WORDS:
                words = tl.load(sources + start // 4 + quarter[None, :])
                tile_inputs = tl.load(here, mask=is_input, other=0.0)
                tile_weights = unpacked(words, tile_inputs, False)
            else:
                tile_weights = tl.load(sources + start + whole[None, :])
                tile_inputs = tl.load(here, mask=is_input, other=0.0)
            before = tl.zeros_like(part) if SCALE_ROWS > 0 else part
            block = tl.dot(tile_weights, tile_inputs, before)
            if IS_E4M3:
                of_channels = scales_of_channels(
                    scales, repeated, tile * TILE_CHANNELS, start, DEPTH, SCALE_ROWS, IS_GATED
                )
                of_rows = scales_of_rows(row_scales, rows, is_row, start, num_rows, SCALE_ROWS)
                part = with_e4m3_block(part, block, of_channels, of_rows, SCALE_ROWS, IS_GATED, 1)
            else:
                factors = block_factors(scales, 0, repeated, start, SCALE_ROWS, NUM_CHANNELS, DEPTH)
                part = with_block(part, block, factors, SCALE_ROWS)
        total += scaled(part, own_scales, own_row_scales, is_scaled_by_segment)
    if IS_GATED:
        store_gated(total, results, tile, rows, is_row, NUM_CHANNELS // 2, TILE_CHANNELS // 2)
    elif IS_SPREAD:
        size = num_rows.to(tl.int64) * NUM_CHANNELS
        places = rows.to(tl.int64)[:, None] * NUM_CHANNELS + channels[None, :]
        tl.store(parts + first * size + places, tl.trans(total), mask=is_result)
        if not LEAVES_PARTS:
            # All threads must have stored their parts before the program is counted as done.
            tl.debug_barrier()
            counter = counters + row_tile * tl.num_programs(0) + tile
            if tl.atomic_add(counter, 1, sem="acq_rel") == NUM_SEGMENTS - 1:
                tl.store(counter, 0)
                summed = tl.zeros([TILE_ROWS, TILE_CHANNELS], tl.float32)
                for segment in range(NUM_SEGMENTS):
                    here = parts + segment * size + places
                    summed += tl.load(here, mask=is_result, other=0.0, cache_modifier=".cg")
                store_rows(
                    summed, own_scales, own_bias, results + places, is_result,
                    is_scaled_last, HAS_BIAS,
                )  # fmt: skip
    else:
        places = rows.to(tl.int64)[:, None] * NUM_CHANNELS + channels[None, :]
        store_rows(
            tl.trans(total), own_scales, own_bias, results + places, is_result,
            is_scaled_last, HAS_BIAS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def fetch_tile(  # type: ignore[no-untyped-def]
    weights, tile, SEGMENT: tl.constexpr, OWN: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr, AHEAD: tl.constexpr,
    IS_SPREAD: tl.constexpr, IS_WORDS: tl.constexpr, IS_E4M3: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Prefetches AHEAD bytes of OWN channels, and of as many gated ones, into L2."""
    num_results: tl.constexpr = NUM_CHANNELS // 2 if IS_GATED else NUM_CHANNELS
    width: tl.constexpr = DEPTH // 4 if IS_WORDS else DEPTH
    stride: tl.constexpr = DEPTH if IS_WORDS or IS_E4M3 else 2 * DEPTH
    source = weights + (tile * OWN).to(tl.int64) * width
    if IS_SPREAD:
        source += tl.program_id(2) * (SEGMENT // 4 if IS_WORDS else SEGMENT)
    # Incomplete tiles prefetch nothing.
    if (tile + 1) * OWN <= num_results:
        fetch_rows(source, OWN, stride, AHEAD)
        if IS_GATED:
            fetch_rows(source + num_results * width, OWN, stride, AHEAD)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(  # type: ignore[no-untyped-def]
    summed, scales, bias, results, is_result, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Writes the sums `[TILE_ROWS, TILE_CHANNELS]` over all segments, after scales and bias."""
    if HAS_SCALES:
        summed *= scales[None, :]
    if HAS_BIAS:
        summed += bias[None, :]
    tl.store(results, summed.to(results.dtype.element_ty), mask=is_result)


@triton.jit  # type: ignore[untyped-decorator]
def store_gated(  # type: ignore[no-untyped-def]
    total, results, tile, rows, is_row, NUM_RESULTS: tl.constexpr, TILE_RESULTS: tl.constexpr
):
    """Writes gated values.

    Args:
        total: `[2 * TILE_RESULTS, TILE_ROWS]`, gates first, then values.
    """
    pairs = tl.reshape(total, [2, TILE_RESULTS, rows.shape[0]])
    gates, gated = tl.split(tl.permute(pairs, (2, 1, 0)))
    dtype = results.dtype.element_ty
    columns = tile * TILE_RESULTS + tl.arange(0, TILE_RESULTS)
    places = rows.to(tl.int64)[:, None] * NUM_RESULTS + columns[None, :]
    tl.store(
        results + places,
        # Rounded first, like products that another kernel would gate.
        silu_times(gates.to(dtype), gated.to(dtype)),
        mask=is_row[:, None] & (columns < NUM_RESULTS)[None, :],
    )


def launch(inputs: Tensor, weight: BatchInvariantOperand, bias: Tensor | None) -> Tensor:
    """Computes `linear.batch_invariant_linear`."""
    if _takes_many(inputs, weight):
        return launch_many(inputs, weight, bias)
    results = inputs.new_empty(len(inputs), len(weight.values))
    segments = weight.segments
    is_spread = segments.count > 1 and not _is_wide(len(inputs))
    parts = (
        inputs.new_empty((segments.count, *results.shape), dtype=torch.float32)
        if is_spread
        else None
    )
    _launch(inputs, weight, bias, results, parts)
    return results


def pays_in_parts(inputs: Tensor, weight: BatchInvariantOperand) -> bool:
    """Whether it is faster if the next kernel adds the segments of a product."""
    if _takes_many(inputs, weight):
        return pays_to_spread(inputs, weight)
    return weight.segments.count > 1 and not _is_words(weight)


def launch_parts(inputs: Tensor, weight: BatchInvariantOperand) -> Partials:
    """Returns the parts of `launch` without a bias, even if there is only one."""
    if _takes_many(inputs, weight):
        return launch_many_parts(inputs, weight)
    shape = weight.segments.count, len(inputs), len(weight.values)
    parts = inputs.new_empty(shape, dtype=torch.float32)
    _launch(inputs, weight, None, parts, parts, leaves_parts=True)
    return Partials(parts, inputs.dtype)


def launch_gated(inputs: Tensor, weight: BatchInvariantOperand) -> Tensor | None:
    """Computes `silu_mul` of `launch` without a bias, with its bits; None if `launch` is faster."""
    if _takes_many(inputs, weight):
        return launch_many_gated(inputs, weight)
    # Measured: gating and dependent launches make products with int8 weights slower, and gating
    # those of more than a few rows with blocks.
    is_slower = weight.scale_rows > 0 and len(inputs) > _MOST_GATED_ROWS_IN_BLOCKS
    if weight.segments.count > 1 or _is_words(weight) or is_slower:
        return None
    results = inputs.new_empty(len(inputs), len(weight.values) // 2)
    _launch(inputs, weight, None, results, None, is_gated=True)
    return results


def _takes_many(inputs: Tensor, weight: BatchInvariantOperand) -> bool:
    return not _is_words(weight) and len(inputs) > MOST_FEW_ROWS


def _is_words(weight: BatchInvariantOperand) -> bool:
    return weight.values.dtype is torch.int8


def _is_wide(num_rows: int) -> bool:
    """Whether there are enough rows to fill a device without cutting the depth."""
    return num_rows > MAX_ROW_TILES * _WIDE_TILE


def _launch(
    inputs: Tensor,
    weight: BatchInvariantOperand,
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
    assert scales is None or scales.is_contiguous()
    if not num_rows:
        return
    is_words, row_scales = _is_words(weight), results
    if weight.is_e4m3:
        inputs, row_scales = quantised_rows(inputs, is_by_block=weight.scale_rows > 0)
    segments, is_wide = weight.segments, _is_wide(num_rows)
    tile_channels = _WIDE_TILE if is_wide else TILE_CHANNELS
    tile_rows = next((rows for rows in _ROW_TILES if rows >= num_rows), _WIDE_TILE)
    stages = _STAGES if scales is None else _WORD_STAGES if is_words else _E4M3_STAGES
    grid = triton.cdiv(num_channels, tile_channels), triton.cdiv(num_rows, tile_rows)
    most_rows = _MOST_WORD_ROWS if is_words else MOST_FEW_ROWS
    launch = dependent_launch(inputs.device, num_rows, most_rows=most_rows)
    # The last segment is the shortest.
    shortest = depth - (segments.count - 1) * segments.length if parts is not None else depth
    num_read = grid[1] * num_channels * (1 if parts is None else segments.count)
    ahead = bytes_ahead(shortest * values.itemsize, num_read) if launch["IS_DEPENDENT"] else 0
    product[(*grid, 1 if parts is None else segments.count)](
        inputs, row_scales, values.view(torch.int32) if is_words else values,
        results if scales is None else scales, results if bias is None else bias,
        results, results if parts is None else parts, weight.counters,
        num_rows, inputs.stride(0),
        NUM_CHANNELS=num_channels, DEPTH=depth,
        SEGMENT=segments.length, NUM_SEGMENTS=segments.count,
        IS_SPREAD=parts is not None, LEAVES_PARTS=leaves_parts, IS_GATED=is_gated,
        IS_WORDS=is_words, IS_E4M3=weight.is_e4m3, SCALE_ROWS=weight.scale_rows,
        HAS_BIAS=bias is not None, TILE_CHANNELS=tile_channels, TILE_ROWS=tile_rows,
        QUARTER=WORD_BLOCK // 4, AHEAD=ahead, num_warps=8 if is_wide else 4,
        num_stages=stages[tile_rows], enable_fp_fusion=not weight.is_e4m3, **launch,
    )  # fmt: skip
