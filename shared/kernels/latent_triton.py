"""Launches the kernels of `latent_jit`: latent attention on CUDA."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from shared.kernels.latent import LatentPlan, block_heads
from shared.kernels.latent_jit import (
    attend_latents,
    combine_latents,
    enter_latents,
    multiply_heads,
)
from shared.kernels.launch import dependent_launch, empties
from shared.kernels.pointwise import Norm, Partials
from shared.kernels.split_plan import SPLITS_PER_LEVEL, num_splits

# A program of this kernel fills a multiprocessor, so splits are longer than in other kernels.
FIRST_SPLIT_KEYS = 512
TILE_KEYS = 64
# Queries and two tiles of 64 keys fill the shared memory of a multiprocessor.
_STAGES = 2
_WARPS = 8
TARGET_PROGRAMS = 528
# Parts that a program loads together and adds.
_GROUP = 16
_MIN_DIMS = 16
_TILE_CHANNELS, _TILE_DEPTH = 64, 128
_ROW_TILES = (16, 32, 64, 128)


def latent_attention(
    queries: Tensor, cache: Tensor, plan: LatentPlan, *, scale: float, latent_dim: int
) -> Tensor:
    """Attends as `paged_attention` does with `value_dim`.

    Args:
        queries: `[T, H, L + R]`.
        cache: `[num_slots, 1, L + R]`.

    Returns:
        `[T, H, L]`; results of padding rows are undefined.
    """
    num_rows, num_heads, dim = queries.shape
    assert queries.is_contiguous()
    assert cache.is_contiguous()
    results = queries.new_empty((num_rows, num_heads, latent_dim))
    blocks, batch, tail = plan.blocks, plan.batch, plan.tail_slots
    num_blocks, heads = len(blocks.counts), block_heads(num_heads)
    rows = blocks.tile // heads
    head_blocks = triton.cdiv(num_heads, heads)
    max_splits = num_splits(max(batch.max_kv_length, 1), FIRST_SPLIT_KEYS)
    shape = (num_blocks * rows, num_heads, max_splits)
    sums = queries.new_empty((*shape, latent_dim), dtype=torch.float32)
    maxima, masses = empties(2, shape, torch.float32, queries.device)
    wanted = triton.cdiv(TARGET_PROGRAMS, num_blocks * head_blocks)
    launch = dependent_launch(queries.device, num_rows)
    options = {
        "ROWS": rows,
        "NUM_HEADS": num_heads,
        "LATENT": latent_dim,
        "BLOCK_LATENT": max(triton.next_power_of_2(latent_dim), _MIN_DIMS),
        "FIRST_SPLIT": FIRST_SPLIT_KEYS,
        "LEVEL_SPLITS": SPLITS_PER_LEVEL,
    }
    tails = batch.page_table if tail is None else tail
    attend_latents[(head_blocks, num_blocks, min(max_splits, wanted))](
        queries, cache, sums, maxima, masses,
        blocks.sequences, blocks.first_rows, blocks.counts,
        plan.row_lengths, plan.shared_lengths, batch.page_table, tails,
        batch.page_table.stride(0), tails.stride(0), max_splits, scale * math.log2(math.e),
        HAS_TAIL=tail is not None, BLOCK_HEADS=heads,
        TILE_KEYS=TILE_KEYS, ROTARY=dim - latent_dim,
        BLOCK_ROTARY=max(triton.next_power_of_2(dim - latent_dim), _MIN_DIMS),
        PAGE_SIZE=batch.page_size, num_warps=_WARPS, num_stages=_STAGES, **options, **launch,
    )  # fmt: skip
    combine_latents[(num_blocks * rows, num_heads)](
        sums, maxima, masses, results, blocks.first_rows, blocks.counts, plan.row_lengths,
        max_splits, GROUP=min(_GROUP, SPLITS_PER_LEVEL), num_warps=4, **options, **launch,
    )  # fmt: skip
    return results


def fused_enter(
    projected: Tensor | Partials,
    query_norm: Norm | None,
    latent_norm: Norm,
    tables: tuple[Tensor, Tensor],
    cache: Tensor,
    slots: Tensor,
) -> Tensor | None:
    num_rows, width = projected.shape
    source, num_parts = (
        (projected.parts, len(projected.parts))
        if isinstance(projected, Partials)
        else (projected, 1)
    )
    assert source.is_contiguous()
    assert cache.is_contiguous()
    latent_dim, rotary_dim = len(latent_norm[0]), tables[0].shape[-1]
    num_queries = width - latent_dim - rotary_dim
    query_weight, query_eps = latent_norm if query_norm is None else query_norm
    queries = None if query_norm is None else cache.new_empty((num_rows, num_queries))
    if num_rows:
        enter_latents[(num_rows, 1 if queries is None else 2)](
            source, query_weight, latent_norm[0], *tables, slots,
            cache if queries is None else queries, cache,
            width, num_rows * width, query_eps, latent_norm[1],
            NUM_PARTS=num_parts, QUERIES=num_queries, LATENT=latent_dim, ROTARY=rotary_dim,
            BLOCK_QUERIES=triton.next_power_of_2(max(num_queries, 1)),
            BLOCK_LATENT=triton.next_power_of_2(latent_dim),
            BLOCK_ROTARY=triton.next_power_of_2(rotary_dim), num_warps=4,
            **dependent_launch(cache.device, num_rows),
        )  # fmt: skip
    return queries


def fused_absorbed_queries(
    queries: Tensor, key_up: Tensor, tables: tuple[Tensor, Tensor]
) -> Tensor:
    return fused_head_products(queries, key_up, tables, is_transposed=True)


def fused_expanded_values(attended: Tensor, value_up: Tensor) -> Tensor:
    return fused_head_products(attended, value_up, None, is_transposed=False)


def fused_head_products(
    rows: Tensor, matrices: Tensor, tables: tuple[Tensor, Tensor] | None, *, is_transposed: bool
) -> Tensor:
    """Returns `[T, H, C + R]` for `[T, H, K + R]`: the first K dimensions of each head times its
    matrix `[C, K]`, or `[K, C]` if transposed, then its last R dimensions, rotated by `tables`."""
    num_rows, num_heads, dim = rows.shape
    rotary_dim = 0 if tables is None else tables[0].shape[-1]
    depth = dim - rotary_dim
    channels = matrices.shape[2 if is_transposed else 1]
    assert matrices.is_contiguous()
    assert rows.stride()[1:] == (dim, 1)
    results = rows.new_empty((num_rows, num_heads, channels + rotary_dim))
    if num_rows:
        tile_rows = next((tile for tile in _ROW_TILES if tile >= num_rows), _ROW_TILES[-1])
        num_tiles = triton.cdiv(channels, _TILE_CHANNELS) + (tables is not None)
        multiply_heads[(num_heads, num_tiles, triton.cdiv(num_rows, tile_rows))](
            rows, matrices, results, *(tables or (rows, rows)), num_rows, rows.stride(0),
            NUM_HEADS=num_heads, CHANNELS=channels, DEPTH=depth, ROTARY=rotary_dim,
            IS_TRANSPOSED=is_transposed, TILE_CHANNELS=_TILE_CHANNELS, TILE_ROWS=tile_rows,
            TILE_DEPTH=_TILE_DEPTH,
            BLOCK_ROTARY=triton.next_power_of_2(max(rotary_dim, 1)), num_warps=4, num_stages=3,
            **dependent_launch(rows.device, num_rows),
        )  # fmt: skip
    return results
