"""Launches products with experts on CUDA; the kernels are in `experts_jit`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.kernels.experts import FEW_TILE, ExpertTiles, ExpertWeight
from shared.kernels.experts_jit import add_weighted, multiply_tiles

_FEW_CHANNELS, _MANY_CHANNELS = 64, 128
_FEW_DEPTH, _MANY_DEPTH = 128, 64
_SUM_BLOCK = 1024


def tiled_product(
    inputs: Tensor, num_shared: int, weight: ExpertWeight, tiles: ExpertTiles, num_pairs: int
) -> Tensor:
    """Multiplies as `expert_product` does.

    Args:
        num_shared: neighbouring pairs that share a row of `inputs`.
    """
    values, scales, bias = weight.values, weight.scales, weight.bias
    assert values is not None
    assert values.is_contiguous()
    assert inputs.stride(1) == 1
    num_experts, num_channels, depth = values.shape
    results = torch.empty((num_pairs, num_channels), dtype=inputs.dtype, device=inputs.device)
    is_few = tiles.num_rows == FEW_TILE
    is_float32 = inputs.dtype is torch.float32
    block = _FEW_CHANNELS if is_few or is_float32 else _MANY_CHANNELS
    multiply_tiles[(triton.cdiv(num_channels, block), len(tiles.experts))](
        inputs, values, values if scales is None else scales,
        values if bias is None else bias, results, tiles.pairs, tiles.experts,
        num_pairs, num_channels, depth, inputs.stride(0), num_shared,
        NUM_EXPERTS=num_experts, HAS_SCALES=scales is not None, HAS_BIAS=bias is not None,
        ROWS=tiles.num_rows, CHANNELS=block,
        DEPTH=_FEW_DEPTH if is_few and not is_float32 else _MANY_DEPTH, IS_FLOAT32=is_float32,
        num_warps=4, num_stages=4 if is_few and not is_float32 else 3,
    )  # fmt: skip
    return results


def fused_weighted_sum(pairs: Tensor, weights: Tensor) -> Tensor:
    """Adds as `weighted_sum` does."""
    num_rows, num_chosen = weights.shape
    num_columns = pairs.shape[1]
    results = torch.empty((num_rows, num_columns), dtype=pairs.dtype, device=pairs.device)
    block = min(_SUM_BLOCK, triton.next_power_of_2(num_columns))
    if num_rows:
        add_weighted[(num_rows, triton.cdiv(num_columns, block))](
            pairs, weights.contiguous(), results, num_columns,
            NUM_CHOSEN=num_chosen, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return results
