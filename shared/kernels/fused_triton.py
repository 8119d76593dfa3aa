"""Launches the small CUDA kernels of `fused_jit`; the plain versions in `pointwise` and `cache`
document them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.kernels.cache import CacheScales
from shared.kernels.fused_jit import (
    add_norm,
    embed_own,
    fill_tables,
    join_inputs,
    rotate_store,
    round_rows,
    silu_product,
)
from shared.kernels.launch import dependent_launch
from shared.kernels.linear import WORD_BLOCK
from shared.kernels.pointwise import Partials
from shared.kernels.quantised import LIMITS, SMALLEST

_BLOCK_HEADS = 8
_WIDE_BLOCK = 2048
_SILU_BLOCK = 1024
# Blocks that a program rounds, where a row has several.
_ROUNDED_BLOCKS = 16
# Elements that a warp rounds.
_ROUNDED_PER_WARP, _MAX_WARPS = 512, 32


def norm_warps(block: int) -> int:
    """Returns the number of warps for a norm over `block` elements; its last bits depend on it."""
    return 8 if block >= _WIDE_BLOCK else 4


def fused_add_rms_norm(
    hidden: Tensor,
    update: Tensor | Partials | None,
    weight: Tensor,
    eps: float,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_columns = hidden.shape[-1]
    sources = hidden.reshape(-1, num_columns)
    assert sources.stride(1) == 1
    shape = hidden.shape if rows is None else (len(rows), num_columns)
    has_update = update is not None
    assert has_update or rows is None, "without an update the first result is hidden itself"
    sums = torch.empty(shape, dtype=hidden.dtype, device=hidden.device) if has_update else hidden
    normed = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
    added, num_parts = (sources, 1) if update is None else parts_of(update)
    num_rows = normed.numel() // num_columns
    if num_rows:
        block = triton.next_power_of_2(num_columns)
        add_norm[(num_rows,)](
            sources, added, weight, sums, normed, sources if rows is None else rows,
            num_columns, sources.stride(0), sources.numel(), eps,
            HAS_UPDATE=has_update, NUM_PARTS=num_parts, HAS_ROWS=rows is not None, BLOCK=block,
            num_warps=norm_warps(block), **dependent_launch(hidden.device, num_rows),
        )  # fmt: skip
    return sums, normed


def parts_of(tensor: Tensor | Partials) -> tuple[Tensor, int]:
    """Returns the contiguous tensor that `fused_jit.summed` reads, and its number of parts."""
    if isinstance(tensor, Partials):
        return tensor.parts, len(tensor.parts)
    return tensor.contiguous(), 1


def fused_join_inputs(
    token_ids: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    rows: Tensor | None,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None,
    *,
    normed_residual: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = len(token_ids), hidden.shape[1]
    assert embedding.is_contiguous()
    assert hidden.is_contiguous()
    inputs = hidden.new_empty((num_rows, 2 * num_columns))
    residual = hidden.new_empty((num_rows, num_columns))
    first, second = norms or ((hidden, 0.0), (hidden, 0.0))
    if num_rows:
        block = triton.next_power_of_2(num_columns)
        join_inputs[(num_rows, 2)](
            token_ids, embedding, hidden, token_ids if rows is None else rows,
            first[0], second[0], inputs, residual, num_columns, first[1], second[1],
            HAS_ROWS=rows is not None, HAS_NORMS=norms is not None,
            NORMED_RESIDUAL=normed_residual, BLOCK=block, num_warps=norm_warps(block),
            **dependent_launch(hidden.device, num_rows),
        )  # fmt: skip
    return inputs, residual


def fused_own_embeddings(token_ids: Tensor, embedding: Tensor, first_token: int) -> Tensor:
    num_rows, (num_tokens, num_columns) = len(token_ids), embedding.shape
    assert embedding.is_contiguous()
    assert token_ids.is_contiguous()
    rows = embedding.new_empty((num_rows, num_columns))
    if num_rows:
        embed_own[(num_rows,)](
            token_ids, embedding, rows, first_token, num_tokens, num_columns,
            BLOCK=triton.next_power_of_2(num_columns), num_warps=4,
            **dependent_launch(embedding.device, num_rows),
        )  # fmt: skip
    return rows


def fused_position_tables(
    positions: Tensor, frequencies: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    num_rows, half = len(positions), frequencies.shape[-1]
    tables = torch.empty((2, num_rows, 1, 2 * half), device=positions.device)
    cos, signed_sin = tables.unbind()
    if num_rows:
        stride = frequencies.stride(0) if frequencies.dim() == 2 else 0
        fill_tables[(num_rows,)](
            positions, frequencies, cos, signed_sin, stride, factor,
            HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
            **dependent_launch(positions.device, num_rows),
        )  # fmt: skip
    return cos, signed_sin


def fused_rotate_into_cache(
    heads: Tensor | Partials,
    norm_weight: Tensor | None,
    eps: float,
    tables: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    scales: CacheScales | None = None,
) -> Tensor:
    num_rows, num_all, head_dim = heads.shape
    keys, values = cache
    num_kv_heads = keys.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    is_in_parts = isinstance(heads, Partials)
    source = heads.parts if isinstance(heads, Partials) else heads
    assert source.stride(-1) == 1
    assert source.stride(-2) == head_dim
    assert keys.is_contiguous()
    assert values.is_contiguous()
    queries = torch.empty((num_rows, num_heads, head_dim), dtype=heads.dtype, device=keys.device)
    if num_rows:
        rotate_store[(num_rows, triton.cdiv(num_all, _BLOCK_HEADS))](
            source, slots if norm_weight is None else norm_weight, *tables, slots,
            queries, keys, values,
            slots if scales is None else scales.keys, slots if scales is None else scales.values,
            source.stride(-3), num_rows * num_all * head_dim, eps,
            NUM_PARTS=len(source) if is_in_parts else 1,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            BLOCK_HEADS=_BLOCK_HEADS, BLOCK_DIM=triton.next_power_of_2(head_dim),
            HAS_NORM=norm_weight is not None, HAS_SCALES=scales is not None, num_warps=4,
            **dependent_launch(keys.device, num_rows),
        )  # fmt: skip
    return queries


def fused_silu_mul(gate_up: Tensor) -> Tensor:
    assert gate_up.is_contiguous()
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        silu_product[(num_rows, triton.cdiv(num_columns, _SILU_BLOCK))](
            gate_up, result, num_columns, BLOCK=_SILU_BLOCK, num_warps=4,
            **dependent_launch(gate_up.device, num_rows),
        )  # fmt: skip
    return result


def fused_quantised_rows(
    rows: Tensor, stored: torch.dtype, *, is_by_block: bool
) -> tuple[Tensor, Tensor]:
    rows = rows.contiguous()
    num_rows, num_columns = rows.shape
    num_blocks = num_columns // WORD_BLOCK if is_by_block else 1
    values = torch.empty_like(rows, dtype=stored)
    scales = torch.empty((num_blocks, num_rows), dtype=torch.float32, device=rows.device)
    if num_rows:
        own_blocks = _ROUNDED_BLOCKS if is_by_block else 1
        size = WORD_BLOCK if is_by_block else triton.next_power_of_2(num_columns)
        round_rows[(num_rows, triton.cdiv(num_blocks, own_blocks))](
            rows, values, scales, num_rows, num_blocks, num_columns // num_blocks,
            LARGEST=LIMITS[stored], SMALLEST=SMALLEST, NUM_BLOCKS=own_blocks, SIZE=size,
            num_warps=max(4, min(own_blocks * size // _ROUNDED_PER_WARP, _MAX_WARPS)),
            # Scaled numbers are rounded before they are rounded to integers.
            enable_fp_fusion=False, **dependent_launch(rows.device, num_rows),
        )  # fmt: skip
    return values, scales
