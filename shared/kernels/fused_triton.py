"""Launches the small CUDA kernels; see `fused_jit`, and the plain versions for what they do."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.kernels.fused_jit import add_norm, rotate_store, silu_product

_BLOCK_HEADS = 8
_SILU_BLOCK = 1024


def fused_add_norm(
    hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns `hidden + update` and its norm; `weight` is `[D]`."""
    num_columns = hidden.shape[-1]
    rows = hidden.reshape(-1, num_columns)
    assert rows.stride(1) == 1
    sums = rows if update is None else torch.empty_like(rows, memory_format=torch.contiguous_format)
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    added = rows if update is None else update.reshape(rows.shape).contiguous()
    if len(rows):
        block = triton.next_power_of_2(num_columns)
        add_norm[(len(rows),)](
            rows, added, weight, sums, normed, num_columns, rows.stride(0), eps,
            HAS_UPDATE=update is not None, BLOCK=block, num_warps=8 if block >= 2048 else 4,
        )  # fmt: skip
    return sums.view(hidden.shape), normed


def fused_rotate_store(
    heads: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    tables: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """Does what `rotate_into_cache` does, in one pass."""
    num_rows, num_all, head_dim = heads.shape
    keys, values = cache
    num_kv_heads = keys.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    assert heads.stride(2) == 1
    assert heads.stride(1) == head_dim
    assert keys.is_contiguous()
    assert values.is_contiguous()
    queries = torch.empty((num_rows, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    if num_rows:
        rotate_store[(num_rows, triton.cdiv(num_all, _BLOCK_HEADS))](
            heads, slots if norm_weight is None else norm_weight, *tables, slots,
            queries, keys, values, heads.stride(0), eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            BLOCK_HEADS=_BLOCK_HEADS, BLOCK_DIM=triton.next_power_of_2(head_dim),
            HAS_NORM=norm_weight is not None, num_warps=4,
        )  # fmt: skip
    return queries


def fused_silu_mul(gate_up: Tensor) -> Tensor:
    """Does what `silu_mul` does for `[T, 2N]`."""
    assert gate_up.is_contiguous()
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        silu_product[(num_rows, triton.cdiv(num_columns, _SILU_BLOCK))](
            gate_up, result, num_columns, BLOCK=_SILU_BLOCK, num_warps=4
        )
    return result
