"""Triton kernel of batch-invariant products of a few rows, with weights in 8 or 16 bits.

The weight's tile is the left operand, so that a few rows of activations fill the short side of a
matrix instruction. Weights in 8 bits are multiplied with rows that are rounded to the same type,
see `quantised.quantised_rows`. Every element of the result is summed along K in steps of one fixed
size, within segments of one fixed length, and the segments are added in order. So its bits depend
only on its own row and channel, whatever the tiles and however programs share the work. Products of
many rows are computed by `many_rows_triton`, with the same bits.

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
from shared.kernels.scaled_jit import (
    scaled,
    scales_of_channels,
    scales_of_rows,
    with_scaled_block,
)

# Rows of a tile, and tiles of weight and rows in flight: with these, three programs fit on a
# multiprocessor.
_STAGES = {16: 4, 32: 4, MOST_FEW_ROWS: 3}
_STAGES_8_BIT = {16: 4, 32: 4, MOST_FEW_ROWS: 4}
# The most rows with which gating pays where blocks in 8 bits have scales.
_MOST_GATED_ROWS_IN_BLOCKS = 32


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]
    inputs, row_scales, weights, scales, bias, results, parts, counters,
    num_rows, input_stride,
    NUM_CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
    SEGMENT: tl.constexpr, NUM_SEGMENTS: tl.constexpr,
    HAS_PARTS: tl.constexpr, LEAVES_PARTS: tl.constexpr, IS_GATED: tl.constexpr,
    IS_8_BIT: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr, TILE_ROWS: tl.constexpr, STEP: tl.constexpr,
    AHEAD: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiplies one segment of a tile, and writes `results` `[T, N]`. If there are several
    segments, their programs first write `parts` `[S, T, N]` float32.

    `counters` are zero before and after.

    Args:
        row_scales: of rows in 8 bits, `[T]`; or `[K / 128, T]` if SCALE_ROWS is not 0.
        LEAVES_PARTS: another kernel adds the parts.
        IS_GATED: the first half of the channels are gates of the second half. A tile has equally
            many of both, and `results` are `[T, N / 2]`. There is one segment, and no bias.
        IS_8_BIT: rows and weights are int8 or e4m3.
        SCALE_ROWS: see `scale_rows`. The sum over a block is scaled before it is added to that of
            the blocks before it. If it is 0, the sum of a segment in 8 bits is scaled.
        AHEAD: bytes of each channel's segment to prefetch while the kernel before this one runs; 0
            prefetches none.
    """
    tile, segment = tl.program_id(0), tl.program_id(1)
    if AHEAD > 0:
        own: tl.constexpr = TILE_CHANNELS // 2 if IS_GATED else TILE_CHANNELS
        fetch_tile(weights, tile, segment * SEGMENT, own, NUM_CHANNELS, DEPTH, AHEAD, IS_GATED)
    lanes = tl.arange(0, TILE_CHANNELS)
    channels = tile * TILE_CHANNELS + lanes
    if IS_GATED:
        half = TILE_CHANNELS // 2
        channels = tile * half + lanes % half + (lanes // half) * (NUM_CHANNELS // 2)
    # Scales and bias, which are needed at the end, are loaded early.
    is_channel = channels < NUM_CHANNELS
    is_by_segment: tl.constexpr = IS_8_BIT and SCALE_ROWS == 0
    own_scales = early(scales + channels, is_channel, is_by_segment)
    own_bias = early(bias + channels, is_channel, HAS_BIAS)
    begin(IS_DEPENDENT)
    rows = tl.arange(0, TILE_ROWS)
    is_row = rows < num_rows
    is_result = is_row[:, None] & is_channel[None, :]
    # Channels past the end repeat the first ones: cheaper than masks on every load.
    repeated = channels % NUM_CHANNELS
    sources = weights + repeated.to(tl.int64)[:, None] * DEPTH
    columns = tl.arange(0, STEP)
    row_inputs = inputs + rows.to(tl.int64)[None, :] * input_stride
    is_input = is_row[None, :]
    own_row_scales = early(row_scales + rows, is_row, is_by_segment)
    sum_type: tl.constexpr = tl.int32 if weights.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([TILE_CHANNELS, TILE_ROWS], tl.float32 if SCALE_ROWS > 0 else sum_type)
    end = tl.minimum((segment + 1) * SEGMENT, DEPTH)
    for start in range(segment * SEGMENT, end, STEP):
        tile_weights = tl.load(sources + start + columns[None, :])
        here = row_inputs + start + columns[:, None]
        tile_inputs = tl.load(here, mask=is_input, other=0.0)
        before = tl.zeros(total.shape, sum_type) if SCALE_ROWS > 0 else total
        block = tl.dot(tile_weights, tile_inputs, before, out_dtype=sum_type)
        of_channels = scales_of_channels(
            scales, repeated, tile * TILE_CHANNELS, start, DEPTH, SCALE_ROWS, IS_GATED
        )
        of_rows = scales_of_rows(row_scales, rows, is_row, start, num_rows, SCALE_ROWS)
        total = with_scaled_block(total, block, of_channels, of_rows, SCALE_ROWS, IS_GATED, 1)
    part = scaled(total, own_scales, own_row_scales, is_by_segment)
    if IS_GATED:
        store_gated(part, results, tile, rows, is_row, NUM_CHANNELS // 2, TILE_CHANNELS // 2)
    else:
        places = rows.to(tl.int64)[:, None] * NUM_CHANNELS + channels[None, :]
        if HAS_PARTS:
            size = num_rows.to(tl.int64) * NUM_CHANNELS
            tl.store(parts + segment * size + places, tl.trans(part), mask=is_result)
            if not LEAVES_PARTS:
                # All threads must have stored their parts before the program is counted as done.
                tl.debug_barrier()
                if tl.atomic_add(counters + tile, 1, sem="acq_rel") == NUM_SEGMENTS - 1:
                    tl.store(counters + tile, 0)
                    summed = tl.zeros([TILE_ROWS, TILE_CHANNELS], tl.float32)
                    for each in range(NUM_SEGMENTS):
                        here = parts + each * size + places
                        summed += tl.load(here, mask=is_result, other=0.0, cache_modifier=".cg")
                    store_rows(summed, own_bias, results + places, is_result, HAS_BIAS)
        else:
            store_rows(tl.trans(part), own_bias, results + places, is_result, HAS_BIAS)


@triton.jit  # type: ignore[untyped-decorator]
def fetch_tile(  # type: ignore[no-untyped-def]
    weights, tile, start, OWN: tl.constexpr, NUM_CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
    AHEAD: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Prefetches AHEAD bytes of OWN channels from column `start` on, and of as many gated ones,
    into L2."""
    num_results: tl.constexpr = NUM_CHANNELS // 2 if IS_GATED else NUM_CHANNELS
    stride: tl.constexpr = DEPTH * weights.dtype.element_ty.primitive_bitwidth // 8
    source = weights + (tile * OWN).to(tl.int64) * DEPTH + start
    # Incomplete tiles prefetch nothing.
    if (tile + 1) * OWN <= num_results:
        fetch_rows(source, OWN, stride, AHEAD)
        if IS_GATED:
            fetch_rows(source + num_results * DEPTH, OWN, stride, AHEAD)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(summed, bias, results, is_result, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the sums `[TILE_ROWS, TILE_CHANNELS]` over all segments, with their bias."""
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
    """Returns `inputs @ weight.T + bias`, `[T, N]`, of `[T, K]` in half precision on CUDA."""
    if len(inputs) > MOST_FEW_ROWS:
        return launch_many(inputs, weight, bias)
    results = inputs.new_empty(len(inputs), len(weight.values))
    count, parts = weight.segments.count, None
    if count > 1:
        parts = inputs.new_empty((count, *results.shape), dtype=torch.float32)
    _launch(inputs, weight, bias, results, parts)
    return results


def pays_in_parts(inputs: Tensor, weight: BatchInvariantOperand) -> bool:
    """Whether it is faster if the next kernel adds the segments of a product."""
    if len(inputs) > MOST_FEW_ROWS:
        return pays_to_spread(inputs, weight)
    return weight.segments.count > 1


def launch_parts(inputs: Tensor, weight: BatchInvariantOperand) -> Partials:
    """Returns the parts of `launch` without a bias, even if there is only one."""
    if len(inputs) > MOST_FEW_ROWS:
        return launch_many_parts(inputs, weight)
    shape = weight.segments.count, len(inputs), len(weight.values)
    parts = inputs.new_empty(shape, dtype=torch.float32)
    _launch(inputs, weight, None, parts, parts, leaves_parts=True)
    return Partials(parts, inputs.dtype)


def launch_gated(inputs: Tensor, weight: BatchInvariantOperand) -> Tensor | None:
    """Computes `silu_mul` of `launch` without a bias, with its bits; None if `launch` is faster."""
    if len(inputs) > MOST_FEW_ROWS:
        return launch_many_gated(inputs, weight)
    is_slower = weight.scale_rows > 0 and len(inputs) > _MOST_GATED_ROWS_IN_BLOCKS
    if weight.segments.count > 1 or is_slower:
        return None
    results = inputs.new_empty(len(inputs), len(weight.values) // 2)
    _launch(inputs, weight, None, results, None, is_gated=True)
    return results


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
    row_scales, segments = results, weight.segments
    if scales is not None:
        inputs, row_scales = quantised_rows(inputs, values.dtype, is_by_block=weight.scale_rows > 0)
    tile_rows = next(rows for rows in _STAGES if rows >= num_rows)
    grid = triton.cdiv(num_channels, TILE_CHANNELS), 1 if parts is None else segments.count
    launch = dependent_launch(inputs.device, num_rows, most_rows=MOST_FEW_ROWS)
    # The last segment is the shortest.
    shortest = depth - (grid[1] - 1) * segments.length
    num_read = grid[1] * num_channels
    ahead = bytes_ahead(shortest * values.itemsize, num_read) if launch["IS_DEPENDENT"] else 0
    product[grid](
        inputs, row_scales, values, results if scales is None else scales,
        results if bias is None else bias, results, results if parts is None else parts,
        weight.counters, num_rows, inputs.stride(0),
        NUM_CHANNELS=num_channels, DEPTH=depth,
        SEGMENT=segments.length, NUM_SEGMENTS=segments.count,
        HAS_PARTS=parts is not None, LEAVES_PARTS=leaves_parts, IS_GATED=is_gated,
        IS_8_BIT=scales is not None, SCALE_ROWS=weight.scale_rows, HAS_BIAS=bias is not None,
        TILE_CHANNELS=TILE_CHANNELS, TILE_ROWS=tile_rows, STEP=WORD_BLOCK, AHEAD=ahead,
        num_warps=4, num_stages=(_STAGES if scales is None else _STAGES_8_BIT)[tile_rows],
        enable_fp_fusion=scales is None, **launch,
    )  # fmt: skip
