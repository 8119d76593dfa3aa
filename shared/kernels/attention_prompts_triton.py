"""Launches attention of prompts on CUDA; the kernel is in `attention_prompts_jit`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from shared.kernels.attention_prompts import PromptPlan
from shared.kernels.attention_prompts_jit import attend_prompts
from shared.kernels.attention_rows import RowPlan

_FEWEST_DIMS = 16
_TILE_KEYS, _WIDE_TILE_KEYS = 64, 32
_WIDE_DIM = 256
# Of keys and values that are expanded at a time.
_MOST_EXPANDED_BYTES = 2**28


def prompt_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    results: Tensor,
    plan: RowPlan,
    *,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> None:
    """Writes what prompts' rows attend to, see `paged_attention`, to `results` `[T', Hq, D]`."""
    assert plan.prompts is not None
    num_kv_heads, dim = keys.shape[1:]
    main = 1 << (dim.bit_length() - 1)
    stride = num_kv_heads * dim
    attend_prompts[(len(plan.prompts.blocks.counts), num_kv_heads)](
        queries, keys, keys[..., main:] if main < dim else keys, values,
        queries if sinks is None else sinks, results,
        *_block_tensors(plan.prompts), plan.batch.positions, plan.batch.page_table,
        queries.stride(0), stride, stride, stride, plan.batch.page_table.stride(0), 0,
        scale * math.log2(math.e), 1.0 if cap is None else cap * math.log2(math.e),
        plan.sliding_window or 0,
        IS_PAGED=True, HAS_CAP=cap is not None, HAS_WINDOW=plan.sliding_window is not None,
        HAS_SINKS=sinks is not None, NUM_HEADS=queries.shape[1],
        NUM_GROUPS=queries.shape[1] // num_kv_heads, DIM=dim, MAIN=main, REST_HEAD=dim,
        KEY_HEAD=dim, VALUE_HEAD=dim, VALUE_DIM=dim, PAGE_SIZE=plan.batch.page_size,
        **_shape_options(queries, dim - main, main, dim, plan.prompts),
    )  # fmt: skip


def expanded_attention(
    queries: Tensor,
    cache: Tensor,
    key_up: Tensor,
    value_up: Tensor,
    results: Tensor,
    plan: RowPlan,
    *,
    scale: float,
) -> None:
    """Writes what prompts' rows attend to, of keys and values that are made of latent vectors, to
    `results` `[T', H, V]`.

    Args:
        queries: `[T, H, N + R]`, of which the last R dimensions are rotated.
        cache: `[num_slots, 1, L + R]`, latent vectors and rotated keys.
        key_up: `[H, N, L]`.
        value_up: `[H, V, L]`.
    """
    assert plan.prompts is not None
    num_heads, straight_dim, latent_dim = key_up.shape
    value_dim, dim = value_up.shape[1], queries.shape[2]
    rows = cache.squeeze(1).index_select(0, plan.prompts.key_slots)
    latents = rows[:, :latent_dim]
    row_bytes = (straight_dim + value_dim) * rows.element_size() * len(rows)
    count = max(1, min(num_heads, _MOST_EXPANDED_BYTES // row_bytes))
    for first in range(0, num_heads, count):
        heads = slice(first, first + count)
        keys = F.linear(latents, key_up[heads].flatten(0, 1))
        values = F.linear(latents, value_up[heads].flatten(0, 1))
        attend_prompts[(len(plan.prompts.blocks.counts), len(key_up[heads]))](
            queries, keys, rows[:, latent_dim:], values, queries, results,
            *_block_tensors(plan.prompts), plan.batch.positions, plan.prompts.key_starts,
            queries.stride(0), keys.stride(0), rows.stride(0), values.stride(0), 0, first,
            scale * math.log2(math.e), 1.0, 0,
            IS_PAGED=False, HAS_CAP=False, HAS_WINDOW=False, HAS_SINKS=False,
            NUM_HEADS=num_heads, NUM_GROUPS=1, DIM=dim, MAIN=straight_dim, REST_HEAD=0,
            KEY_HEAD=straight_dim, VALUE_HEAD=value_dim, VALUE_DIM=value_dim, PAGE_SIZE=1,
            **_shape_options(
                queries, dim - straight_dim, straight_dim, value_dim, plan.prompts
            ),
        )  # fmt: skip


def _block_tensors(prompts: PromptPlan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = prompts.blocks
    return blocks.sequences, blocks.first_rows, blocks.counts, prompts.row_lengths


def _shape_options(
    queries: Tensor, rest: int, main: int, value_dim: int, prompts: PromptPlan
) -> dict[str, int | bool]:
    is_wide = main >= _WIDE_DIM
    return {
        "REST": max(triton.next_power_of_2(rest), _FEWEST_DIMS) if rest else 0,
        "BLOCK_MAIN": max(triton.next_power_of_2(main), _FEWEST_DIMS),
        "BLOCK_VALUES": max(triton.next_power_of_2(value_dim), _FEWEST_DIMS),
        "TILE_ROWS": prompts.blocks.tile,
        "TILE_KEYS": _WIDE_TILE_KEYS if is_wide else _TILE_KEYS,
        "IS_FLOAT32": queries.dtype is torch.float32,
        "num_warps": 8,
        "num_stages": 2,
    }
