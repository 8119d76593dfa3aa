"""Triton kernel of products of many rows with weights in 8 or 16 bits, with the bits of the kernel
for few rows.

Sums along K are those of `batch_invariant_triton`: one matrix instruction after another within
segments, which depend on the weight's shape, and the segments in order. Tiles only affect speed.

A program computes one tile after another. Hopper's tensor memory accelerator (TMA) copies weights
and rows into shared memory, with zeros past the end of a tensor.

Source: persistent programs and groups of tiles, Triton's tutorials 3 and 9.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.kernels.dependent_jit import begin, early
from shared.kernels.fused_jit import silu_times
from shared.kernels.launch import dependent_launch
from shared.kernels.linear import BatchInvariantOperand
from shared.kernels.pointwise import Partials
from shared.kernels.quantised import quantised_rows
from shared.kernels.scaled_jit import (
    scaled,
    scales_of_channels,
    scales_of_rows,
    with_scaled_block,
)

_TILE_ROWS = 128
# Row tiles that are multiplied with the same channels of a weight in turn, so that both stay in the
# L2 cache.
_GROUP = 16
# Up to this many rows a product is memory-bound. Its segments are spread over programs, with
# dependent launch.
_MOST_SPREAD_ROWS = 256
_COPY_ALIGNMENT = 16


class Sum(enum.Enum):
    """How the segments of K are added."""

    WHOLE = "there is only one segment"
    IN_TURN = "a program adds all segments of its tile"
    SPREAD = "a program writes one segment of a tile, and another kernel adds them"


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def many_rows_product(  # type: ignore[no-untyped-def]
    inputs, more_inputs, row_scales, weights, scales, bias, results,
    num_rows, num_channels, depth, segment, num_segments,
    IS_SPREAD: tl.constexpr, IS_IN_TURN: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_FLAT: tl.constexpr, IS_8_BIT: tl.constexpr, SCALE_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr, MORE_ROWS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
    STEP: tl.constexpr, GROUP: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes `results` `[T, N]`; if segments are spread, their parts `[S, T, N]` float32.

    Args:
        inputs: descriptor of `[T, K]` in tiles `[TILE_ROWS, STEP]`.
        more_inputs: the same in tiles `[MORE_ROWS, STEP]`, which follow those of `inputs`.
        row_scales, scales, IS_8_BIT, SCALE_ROWS: see `batch_invariant_triton.product`.
        weights: descriptor of `[N, K]` in tiles `[TILE_CHANNELS, STEP]`.
        IS_GATED: the first half of the channels are gates of the second half. `weights` are
            `[2, N / 2, K]`, a tile has equally many of both, and `results` are `[T, N / 2]`. There
            is one segment and no bias.
        IS_FLAT: a program loads its next tile into shared memory while it writes one.
        GROUP: row tiles that are multiplied with the same channels in turn.
    """
    begin(IS_DEPENDENT)
    own_rows: tl.constexpr = TILE_ROWS + MORE_ROWS
    own: tl.constexpr = TILE_CHANNELS // 2 if IS_GATED else TILE_CHANNELS
    num_results = num_channels // 2 if IS_GATED else num_channels
    row_tiles, channel_tiles = tl.cdiv(num_rows, own_rows), tl.cdiv(num_results, own)
    num_tiles = row_tiles * channel_tiles
    num_units = num_tiles * num_segments if IS_SPREAD else num_tiles
    size = num_rows.to(tl.int64) * num_results
    is_by_segment: tl.constexpr = IS_8_BIT and SCALE_ROWS == 0
    sum_type: tl.constexpr = tl.int32 if weights.dtype == tl.int8 else tl.float32
    tile_rows, tile_channels = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_CHANNELS)
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0), flatten=IS_FLAT):
        tile = unit % num_tiles if IS_SPREAD else unit
        group = tile // (GROUP * channel_tiles)
        inside = tile % (GROUP * channel_tiles)
        in_group = tl.minimum(row_tiles - group * GROUP, GROUP)
        row = (group * GROUP + inside % in_group) * own_rows
        channel = inside // in_group * own
        first, last, target = 0, depth, results
        if IS_SPREAD:
            first = unit // num_tiles * segment
            last = tl.minimum(first + segment, depth)
            target += unit // num_tiles * size
        part = tl.zeros([TILE_ROWS, TILE_CHANNELS], tl.float32 if SCALE_ROWS > 0 else sum_type)
        more = tl.zeros([MORE_ROWS, TILE_CHANNELS], tl.float32) if MORE_ROWS > 0 else 0.0
        total, end = tl.zeros(part.shape, tl.float32) if IS_IN_TURN else 0.0, segment
        rows, channels = row + tile_rows, channel + tile_channels
        if IS_GATED:
            channels = channel + tile_channels % own + tile_channels // own * num_results
        # Channels past the end repeat the first ones, see `batch_invariant_triton.product`.
        channels = channels % num_channels
        is_row = rows < num_rows
        for start in tl.range(first, last, STEP):
            some = inputs.load([row, start])
            if IS_GATED:
                pairs = weights.load([0, channel, start])
                factors = tl.reshape(pairs, [TILE_CHANNELS, STEP]).T
            else:
                factors = weights.load([channel, start]).T
            before = tl.zeros(part.shape, sum_type) if SCALE_ROWS > 0 else part
            block = tl.dot(some, factors, before, out_dtype=sum_type)
            of_channels = scales_of_channels(
                scales, channels, channel, start, depth, SCALE_ROWS, IS_GATED
            )
            of_rows = scales_of_rows(row_scales, rows, is_row, start, num_rows, SCALE_ROWS)
            part = with_scaled_block(part, block, of_channels, of_rows, SCALE_ROWS, IS_GATED, 0)
            if MORE_ROWS > 0:
                more = tl.dot(more_inputs.load([row + TILE_ROWS, start]), factors, more)
            if IS_IN_TURN:
                if start + STEP == end:
                    total += rescaled(
                        part, row_scales + rows, is_row, scales + channels, is_by_segment
                    )
                    part = tl.zeros_like(part)
                    end += segment
        sums = rescaled(part, row_scales + rows, is_row, scales + channels, is_by_segment)
        if IS_IN_TURN:
            # Adds the last segment, if it is shorter than the others.
            sums += total
        store_tile(sums, target, bias, row, channel, num_rows, num_results, IS_GATED, HAS_BIAS, own)
        if MORE_ROWS > 0:
            store_tile(
                more, target, bias, row + TILE_ROWS, channel, num_rows, num_results,
                IS_GATED, HAS_BIAS, own,
            )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def rescaled(part, of_rows, is_row, of_channels, IS_SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `scaled`, with the factors' places: they take no registers before they are needed."""
    row_factors = early(of_rows, is_row, IS_SCALED)
    channel_factors = early(of_channels, tl.full(part.shape[1:], True, tl.int1), IS_SCALED)
    return scaled(part, row_factors, channel_factors, IS_SCALED)


@triton.jit  # type: ignore[untyped-decorator]
def store_tile(  # type: ignore[no-untyped-def]
    tile, results, bias, row, channel, num_rows, num_results,
    IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Writes the OWN channels of a tile of sums, with their bias or gated."""
    dtype = results.dtype.element_ty
    rows = row + tl.arange(0, tile.shape[0])
    channels = channel + tl.arange(0, OWN)
    is_channel = channels < num_results
    if IS_GATED:
        gates, gated = tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, OWN]), (0, 2, 1)))
        # Rounded first, like products that another kernel would gate.
        tile = silu_times(gates.to(dtype), gated.to(dtype))
    if HAS_BIAS:
        tile += early(bias + channels, is_channel, HAS_BIAS)[None, :]
    places = rows.to(tl.int64)[:, None] * num_results + channels[None, :]
    tl.store(results + places, tile.to(dtype), mask=(rows < num_rows)[:, None] & is_channel)


def launch_many(inputs: Tensor, weight: BatchInvariantOperand, bias: Tensor | None) -> Tensor:
    """As `batch_invariant_triton.launch`."""
    results = inputs.new_empty(len(inputs), len(weight.values))
    sum_ = Sum.WHOLE if weight.segments.count == 1 else Sum.IN_TURN
    _launch(inputs, weight, bias, results, sum_)
    return results


def launch_many_parts(inputs: Tensor, weight: BatchInvariantOperand) -> Partials:
    """As `batch_invariant_triton.launch_parts`."""
    shape = weight.segments.count, len(inputs), len(weight.values)
    parts = inputs.new_empty(shape, dtype=torch.float32)
    _launch(inputs, weight, None, parts, Sum.SPREAD)
    return Partials(parts, inputs.dtype)


def launch_many_gated(inputs: Tensor, weight: BatchInvariantOperand) -> Tensor | None:
    """As `batch_invariant_triton.launch_gated`."""
    # A tile of gates and values in blocks has two scales, which makes products slower.
    if weight.segments.count > 1 or weight.scale_rows > 0:
        return None
    results = inputs.new_empty(len(inputs), len(weight.values) // 2)
    _launch(inputs, weight, None, results, Sum.WHOLE, is_gated=True)
    return results


def pays_to_spread(inputs: Tensor, weight: BatchInvariantOperand) -> bool:
    """Whether it is faster if programs share the segments of a tile: a few tiles would leave most
    of a device idle, however many rows they have."""
    num_rows, num_channels = len(inputs), len(weight.values)
    num_tiles = triton.cdiv(num_rows, _TILE_ROWS) * triton.cdiv(num_channels, _NARROW.channels)
    is_small = num_rows <= _MOST_SPREAD_ROWS or (
        2 * num_tiles <= _num_multiprocessors(inputs.device)
    )
    return weight.segments.count > 1 and is_small


@dataclass(frozen=True, slots=True)
class Tiling:
    """How programs share a product.

    Attributes:
        channels: channels of the weight in a tile.
        step: columns that are multiplied at once.
        stages: pipeline stages: steps whose weights and rows are in flight.
        rows: rows of a tile.
        more_rows: rows of a tile besides these.
        num_programs: programs that fit on a multiprocessor.
        num_warps: of a program.
    """

    channels: int
    step: int
    stages: int
    rows: int = _TILE_ROWS
    more_rows: int = 0
    num_programs: int = 1
    num_warps: int = 8


# Measured on an H100 and an H200 with the matrices of an 8B model. A tile of 256 channels reads the
# fewest bytes per operation. The other tilings fill a device when there are fewer rows, or waste
# less time where the rows do not fill the last tiles.
_BROAD, _NARROW = Tiling(256, 64, 4), Tiling(128, 64, 5)
_SHORT, _SHORT_SPREAD = Tiling(128, 64, 3, num_programs=2), Tiling(128, 128, 3)
_TALL = Tiling(128, 64, 5, more_rows=64)
_MOST_TALL_ROWS = 192
_LOW, _LOW_WHOLE = Tiling(256, 64, 5, rows=64), Tiling(256, 64, 4, rows=64, num_warps=4)
_SMALL = Tiling(128, 64, 3, rows=64, num_programs=3, num_warps=4)
TILINGS = {
    Sum.WHOLE: (_BROAD, _LOW_WHOLE),
    Sum.IN_TURN: (_BROAD, _NARROW, _LOW, _SMALL),
    Sum.SPREAD: (_BROAD, _NARROW),
}
"""The tilings of products with weights in 16 bits, to choose from by `tiling_of`."""
# The same with 8 bits, measured with e4m3.
_BROAD_8_BIT = Tiling(256, 128, 3)
_SHORT_8_BIT = Tiling(128, 128, 4, rows=64, num_programs=2, num_warps=4)
# Measured with rounds of 384 rows, which took 13.4 ms with short tiles alone, and 17.3 otherwise.
_MOST_SHORT_8_BIT_ROWS = 512
# Fixed cost of a turn, in channels of a tile, for every two programs of a multiprocessor.
_TURN_COST = 32


@functools.cache
def tiling_of(
    num_rows: int,
    num_channels: int,
    num_parts: int,
    num_multiprocessors: int,
    sum_: Sum,
    *,
    is_8_bit: bool = False,
    has_blocks: bool = False,
) -> Tiling:
    """Returns the tiling of a product of these sizes that writes `num_parts` parts.

    Args:
        has_blocks: blocks in 8 bits have scales, so that a program has two sums of each element.
    """
    if has_blocks or (is_8_bit and _MOST_SPREAD_ROWS < num_rows <= _MOST_SHORT_8_BIT_ROWS):
        return _SHORT_8_BIT
    if not is_8_bit and sum_ is not Sum.IN_TURN and num_rows <= _MOST_TALL_ROWS:
        if num_rows > _TILE_ROWS:
            return _TALL
        return _SHORT_SPREAD if sum_ is Sum.SPREAD else _SHORT

    def cost(tiling: Tiling) -> tuple[float, int]:
        """Returns the estimated time, in channels of a tile, and the rows of all tiles."""
        row_tiles = triton.cdiv(num_rows, tiling.rows)
        num_tiles = row_tiles * triton.cdiv(num_channels, tiling.channels)
        num_turns = triton.cdiv(num_tiles * num_parts, num_multiprocessors * tiling.num_programs)
        num_channels_each = tiling.channels * tiling.num_programs * tiling.rows / _TILE_ROWS
        fixed = _TURN_COST * triton.cdiv(tiling.num_programs, 2)
        return num_turns * (num_channels_each + fixed), row_tiles * tiling.rows

    return min((_BROAD_8_BIT, _SHORT_8_BIT) if is_8_bit else TILINGS[sum_], key=cost)


def _launch(
    inputs: Tensor,
    weight: BatchInvariantOperand,
    bias: Tensor | None,
    results: Tensor,
    sum_: Sum,
    *,
    is_gated: bool = False,
) -> None:
    values, segments = weight.values, weight.segments
    num_rows, (num_channels, depth) = len(inputs), values.shape
    row_scales, scale_rows, is_8_bit = results, weight.scale_rows, weight.scales is not None
    if is_8_bit:
        inputs, row_scales = quantised_rows(inputs, values.dtype, is_by_block=scale_rows > 0)
    inputs = _copyable(inputs)
    num_multiprocessors = _num_multiprocessors(inputs.device)
    is_spread = sum_ is Sum.SPREAD
    num_parts = segments.count if is_spread else 1
    sizes = num_rows, num_channels, num_parts, num_multiprocessors
    tiling = tiling_of(*sizes, sum_, is_8_bit=is_8_bit, has_blocks=scale_rows > 0)
    channels, step = tiling.channels, tiling.step
    num_units = triton.cdiv(num_rows, tiling.rows + tiling.more_rows) * num_parts
    if is_gated:
        half = num_channels // 2
        whole = [2, half, depth], [half * depth, depth, 1], [2, channels // 2, step]
        weights = TensorDescriptor(values, *whole)
        num_units *= triton.cdiv(half, channels // 2)
    else:
        weights = TensorDescriptor.from_tensor(values, [channels, step])
        num_units *= triton.cdiv(num_channels, channels)
    launch = dependent_launch(inputs.device, num_rows, most_rows=_MOST_SPREAD_ROWS)
    many_rows_product[(min(num_units, num_multiprocessors * tiling.num_programs),)](
        TensorDescriptor.from_tensor(inputs, [tiling.rows, step]),
        TensorDescriptor.from_tensor(inputs, [tiling.more_rows or tiling.rows, step]),
        row_scales, weights, results if weight.scales is None else weight.scales,
        results if bias is None else bias, results,
        num_rows, num_channels, depth, segments.length, segments.count,
        IS_SPREAD=is_spread, IS_IN_TURN=sum_ is Sum.IN_TURN, IS_GATED=is_gated,
        HAS_BIAS=bias is not None, IS_FLAT=sum_ is Sum.WHOLE and num_rows > _MOST_TALL_ROWS,
        IS_8_BIT=is_8_bit, SCALE_ROWS=scale_rows,
        TILE_ROWS=tiling.rows, MORE_ROWS=tiling.more_rows, TILE_CHANNELS=channels,
        STEP=step, GROUP=_GROUP,
        num_warps=tiling.num_warps, num_stages=tiling.stages, enable_fp_fusion=not is_8_bit,
        **launch,
    )  # fmt: skip


def _copyable(rows: Tensor) -> Tensor:
    """Returns the rows `[T, K]` with addresses that TMA supports, copied if need be."""
    is_aligned = (rows.data_ptr() | rows.stride(0) * rows.itemsize) % _COPY_ALIGNMENT == 0
    is_plain = rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]
    return rows if is_aligned and is_plain else rows.clone(memory_format=torch.contiguous_format)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    # The interpreter computes programs one by one; with 2, each program has several tiles.
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 2
