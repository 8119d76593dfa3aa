"""Triton kernel of prompt attention for what `attention_jit` does not support: soft caps, sinks,
keys of a width that is split in two parts, and keys and values outside of the paged cache.

Source: Dao, arXiv 2307.08691 (online softmax over tiles).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.attention_rows import PromptPlan, RowPlan
from shared.kernels.attention_rows_jit import capped
from shared.kernels.attention_walk_jit import lanes_of, lowest_keys

_MIN_DIMS = 16
_TILE_KEYS, _WIDE_TILE_KEYS = 64, 32
_WIDE_DIM = 256
# The most bytes of keys and values that are expanded at a time.
_MAX_EXPANDED_BYTES = 2**28


@triton.jit(do_not_specialize=["page_stride", "window", "first_head"])  # type: ignore[untyped-decorator]
def attend_prompts(  # type: ignore[no-untyped-def]
    queries, keys, rests, values, sinks, results,
    block_sequences, block_first_rows, block_counts, row_lengths, positions, places,
    query_stride, key_stride, rest_stride, value_stride, page_stride, first_head,
    scale_log2, cap, window,
    IS_PAGED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_MAIN: tl.constexpr,
    REST_HEAD: tl.constexpr, KEY_HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_VALUES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, IS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Attends from a block of rows of one prompt and one key head.

    Args:
        rests: the last DIM - MAIN dimensions of keys.
        places: the page table; or, of keys that are not paged, the index of each sequence's first
            key.
        first_head: query head of the first key head.
        KEY_HEAD: stride between heads in keys; likewise REST_HEAD and VALUE_HEAD.
    """
    # The last blocks see most keys; starting with them balances the load at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    count = tl.load(block_counts + block)
    if count == 0:
        return
    kv_head = tl.program_id(1)
    sequence = tl.load(block_sequences + block)
    first_row = tl.load(block_first_rows + block)
    lane_rows, rows, heads = lanes_of(first_row, kv_head, NUM_GROUPS, TILE_ROWS)
    heads += first_head
    is_lane = lane_rows < count
    dims, value_dims = tl.arange(0, BLOCK_MAIN), tl.arange(0, BLOCK_VALUES)
    own = queries + rows[:, None].to(tl.int64) * query_stride + heads[:, None] * DIM
    query = tl.load(own + dims[None, :], mask=is_lane[:, None] & (dims < MAIN)[None, :], other=0.0)
    query_rest = query
    rest = tl.arange(0, REST if REST > 0 else 16)
    is_rest = MAIN + rest < DIM
    if REST > 0:
        query_rest = tl.load(
            own + (MAIN + rest)[None, :], mask=is_lane[:, None] & is_rest[None, :], other=0.0
        )
    lengths = tl.load(row_lengths + rows, mask=is_lane, other=0)
    lows = lowest_keys(positions, rows, is_lane, window, lengths, HAS_WINDOW)
    longest = tl.max(lengths, 0)
    lowest = tl.min(tl.where(is_lane, lows, longest), 0)
    precision: tl.constexpr = "ieee" if IS_FLOAT32 else "tf32"
    low = float("-inf")
    high = tl.full((TILE_ROWS,), low, tl.float32)
    mass = tl.zeros((TILE_ROWS,), tl.float32)
    total = tl.zeros((TILE_ROWS, BLOCK_VALUES), tl.float32)
    head_keys, head_values = keys + kv_head * KEY_HEAD, values + kv_head * VALUE_HEAD
    head_rests = rests + kv_head * REST_HEAD
    for tile in range(lowest // TILE_KEYS * TILE_KEYS, longest, TILE_KEYS):
        indices = tile + tl.arange(0, TILE_KEYS)
        is_key = indices < longest
        if IS_PAGED:
            pages = places + sequence.to(tl.int64) * page_stride
            page = tl.load(pages + indices // PAGE_SIZE, mask=is_key, other=0)
            slots = page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE
        else:
            slots = tl.load(places + sequence) + indices
        key = tl.load(
            head_keys + slots[:, None] * key_stride + dims[None, :],
            mask=is_key[:, None] & (dims < MAIN)[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(key), input_precision=precision)
        if REST > 0:
            key_rest = tl.load(
                head_rests + slots[:, None] * rest_stride + rest[None, :],
                mask=is_key[:, None] & is_rest[None, :], other=0.0,
            )  # fmt: skip
            scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision=precision)
        scores *= scale_log2
        if HAS_CAP:
            scores = capped(scores, cap)
        is_seen = indices[None, :] < lengths[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (indices[None, :] >= lows[:, None])
        scores = tl.where(is_seen, scores, low)
        both = tl.maximum(high, tl.max(scores, 1))
        base = tl.where(both == low, 0.0, both)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(high - base)
        value = tl.load(
            head_values + slots[:, None] * value_stride + value_dims[None, :],
            mask=is_key[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        mass = mass * kept + tl.sum(weights, 1)
        total *= kept[:, None]
        total = tl.dot(weights.to(value.dtype), value, total, input_precision=precision)
        high = both
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_lane, other=0.0).to(tl.float32) * 1.4426950408889634
        both = tl.maximum(high, sink)
        kept = tl.exp2(high - both)
        mass = mass * kept + tl.exp2(sink - both)
        total *= kept[:, None]
    place = (rows[:, None].to(tl.int64) * NUM_HEADS + heads[:, None]) * VALUE_DIM
    tl.store(
        results + place + value_dims[None, :], total / tl.maximum(mass, 1e-37)[:, None],
        mask=is_lane[:, None] & (value_dims < VALUE_DIM)[None, :],
    )  # fmt: skip


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
    """Writes the attention results of prompts' rows, see `paged_attention`, to `results`
    `[T', Hq, D]`."""
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
    prompts: PromptPlan,
    *,
    scale: float,
) -> None:
    """Writes the attention results of prompts' rows to `results` `[T', H, V]`, with keys and values
    expanded from latent vectors.

    Args:
        queries: `[T, H, N + R]`, of which the last R dimensions are rotated.
        cache: `[num_slots, 1, L + R]`, latent vectors and rotated keys.
        key_up: `[H, N, L]`.
        value_up: `[H, V, L]`.
    """
    num_heads, unrotated_dim, latent_dim = key_up.shape
    value_dim, dim = value_up.shape[1], queries.shape[2]
    rows = cache.squeeze(1).index_select(0, prompts.key_slots)
    latents = rows[:, :latent_dim]
    row_bytes = (unrotated_dim + value_dim) * rows.element_size() * len(rows)
    count = max(1, min(num_heads, _MAX_EXPANDED_BYTES // row_bytes))
    for first in range(0, num_heads, count):
        heads = slice(first, first + count)
        keys = F.linear(latents, key_up[heads].flatten(0, 1))
        values = F.linear(latents, value_up[heads].flatten(0, 1))
        attend_prompts[(len(prompts.blocks.counts), len(key_up[heads]))](
            queries, keys, rows[:, latent_dim:], values, queries, results,
            *_block_tensors(prompts), prompts.key_starts, prompts.key_starts,
            queries.stride(0), keys.stride(0), rows.stride(0), values.stride(0), 0, first,
            scale * math.log2(math.e), 1.0, 0,
            IS_PAGED=False, HAS_CAP=False, HAS_WINDOW=False, HAS_SINKS=False,
            NUM_HEADS=num_heads, NUM_GROUPS=1, DIM=dim, MAIN=unrotated_dim, REST_HEAD=0,
            KEY_HEAD=unrotated_dim, VALUE_HEAD=value_dim, VALUE_DIM=value_dim, PAGE_SIZE=1,
            **_shape_options(queries, dim - unrotated_dim, unrotated_dim, value_dim, prompts),
        )  # fmt: skip


def _block_tensors(prompts: PromptPlan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = prompts.blocks
    return blocks.sequences, blocks.first_rows, blocks.counts, prompts.row_lengths


def _shape_options(
    queries: Tensor, rest: int, main: int, value_dim: int, prompts: PromptPlan
) -> dict[str, int | bool]:
    is_wide = main >= _WIDE_DIM
    return {
        "REST": max(triton.next_power_of_2(rest), _MIN_DIMS) if rest else 0,
        "BLOCK_MAIN": max(triton.next_power_of_2(main), _MIN_DIMS),
        "BLOCK_VALUES": max(triton.next_power_of_2(value_dim), _MIN_DIMS),
        "TILE_ROWS": prompts.blocks.tile,
        "TILE_KEYS": _WIDE_TILE_KEYS if is_wide else _TILE_KEYS,
        "IS_FLOAT32": queries.dtype is torch.float32,
        "num_warps": 8,
        "num_stages": 2,
    }
