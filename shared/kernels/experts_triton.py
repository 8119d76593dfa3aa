"""Launches products with experts on CUDA; the kernels are in `experts_jit`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shared.kernels.activation import Activation
from shared.kernels.dependent import dependent_launch
from shared.kernels.experts import ExpertTiles, ExpertWeight
from shared.kernels.experts_jit import add_weighted, lay_tiles, multiply_tiles
from shared.kernels.partials import Partials
from shared.kernels.quantised import from_words
from shared.kernels.steady import WORD_BLOCK

# Pairs that one program counts.
MOST_PAIRS = 4096
_COUNT_CHUNK = 32
_SUM_BLOCK = 1024
_GATES = {
    None: 0,
    Activation.SILU: 1,
    Activation.GELU_TANH: 2,
    Activation.CLAMPED_SWIGLU: 3,
}


@dataclass(frozen=True, slots=True)
class TileShape:
    """Launch parameters of a product for a given number of rows a tile.

    Attributes:
        step: of the depth; of words it is `WORD_BLOCK`.
    """

    channels: int
    step: int
    num_warps: int
    num_stages: int


# As in `steady_triton`, whose products of few rows are the same.
TILE_SHAPES = {
    16: TileShape(64, 128, 4, 4),
    32: TileShape(64, 128, 4, 4),
    64: TileShape(128, 64, 4, 4),
    128: TileShape(128, 64, 8, 4),
}
_FLOAT32_SHAPE = TileShape(32, 32, 4, 2)


def fused_tiles(experts: Tensor, num_experts: int, num_rows: int, num_tiles: int) -> ExpertTiles:
    """Sorts as `tiles_of` does, up to `MOST_PAIRS` pairs."""
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


def tiled_product(
    inputs: Tensor,
    num_shared: int,
    weight: ExpertWeight,
    tiles: ExpertTiles,
    num_pairs: int,
    activation: Activation | None = None,
) -> Tensor:
    """Multiplies as `expert_product` does, or as `gated_product`.

    Args:
        num_shared: neighbouring pairs that share a row of `inputs`.
    """
    assert weight.values is not None
    num_channels = weight.values.shape[1] // (1 if activation is None else 2)
    results = inputs.new_empty((num_pairs, num_channels))
    _launch(inputs, num_shared, weight, tiles, num_pairs, results, activation, None)
    return results


def tiled_parts(
    inputs: Tensor, weight: ExpertWeight, tiles: ExpertTiles, weights: Tensor
) -> Partials:
    """Returns the sum that `weighted_sum` makes of `expert_product`, in parts of equal bits.

    Args:
        inputs: `[P, K]`, one a pair.
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
    values, scales, bias = weight.values, weight.scales, weight.bias
    assert values is not None
    assert values.is_contiguous()
    assert inputs.stride(1) == 1
    num_experts, num_channels, depth = values.shape
    is_packed = weight.is_packed and inputs.dtype in (torch.bfloat16, torch.float16)
    if weight.is_packed and not is_packed:
        values = from_words(values.flatten(0, 1)).view_as(values)
    is_float32 = inputs.dtype is torch.float32
    shape = _FLOAT32_SHAPE if is_float32 else TILE_SHAPES[tiles.num_rows]
    tile_results = shape.channels // (1 if activation is None else 2)
    grid = triton.cdiv(num_channels, shape.channels), len(tiles.experts)
    if activation is not None:
        grid = triton.cdiv(num_channels // 2, tile_results), len(tiles.experts)
    multiply_tiles[grid](
        inputs, values.view(torch.int32) if is_packed else values,
        results if scales is None else scales, results if bias is None else bias,
        results if factors is None else factors, results, tiles.pairs, tiles.experts,
        num_pairs, inputs.stride(0), num_shared,
        NUM_EXPERTS=num_experts, NUM_CHANNELS=num_channels, DEPTH=depth,
        HAS_SCALES=scales is not None, IS_PACKED=is_packed,
        IS_E4M3=values.dtype is torch.float8_e4m3fn, HAS_BIAS=bias is not None,
        GATE=_GATES[activation], NUM_PARTS=0 if factors is None else factors.shape[1],
        TILE_ROWS=tiles.num_rows, TILE_CHANNELS=shape.channels,
        STEP=WORD_BLOCK if is_packed else shape.step, IS_FLOAT32=is_float32,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
        **dependent_launch(inputs.device, num_pairs // 8),
    )  # fmt: skip


def fused_weighted_sum(pairs: Tensor, weights: Tensor, more: Tensor | None) -> Tensor:
    """Adds as `weighted_sum` does."""
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
