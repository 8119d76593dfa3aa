"""Triton kernel of attention of prompt chunks: large blocks of rows, no splits."""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.attention_walk_jit import (
    absorb_common,
    lanes_of,
    loaded_queries,
    lowest_keys,
    pages_of,
)


@triton.jit(do_not_specialize=["page_stride", "window"])  # type: ignore[untyped-decorator]
def attend_chunk(  # type: ignore[no-untyped-def]
    queries, keys, values, key_scales, value_scales, results,
    block_sequences, block_first_rows, block_counts,
    row_lengths, positions, page_table,
    query_stride, page_stride, scale_log2, window,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Attends from a block of causal rows of one sequence and one key head."""
    # The last blocks see most keys; starting with them evens out the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    count = tl.load(block_counts + block)
    if count == 0:
        return
    kv_head = tl.program_id(1)
    sequence = tl.load(block_sequences + block)
    first_row = tl.load(block_first_rows + block)
    lane_rows, rows, heads = lanes_of(first_row, kv_head, NUM_GROUPS, TILE_ROWS)
    is_lane = lane_rows < count
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    is_stored = is_lane[:, None] & is_dim[None, :]
    tile_queries = loaded_queries(
        queries, rows, heads, is_stored, query_stride, HEAD_DIM, BLOCK_DIM
    )
    lengths = tl.load(row_lengths + rows, mask=is_lane, other=0)
    lows = lowest_keys(positions, rows, is_lane, window, lengths, HAS_WINDOW)
    longest = tl.max(lengths, 0)
    lowest = tl.min(tl.where(is_lane, lows, longest), 0)
    if IS_E4M3:
        scale_log2 *= tl.load(key_scales + kv_head)
    pages = page_table + sequence * page_stride
    head_keys = keys + kv_head * HEAD_DIM
    head_values = values + kv_head * HEAD_DIM
    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)
    total = tl.zeros([TILE_ROWS, BLOCK_DIM], tl.float32)
    first = lowest // TILE_KEYS * TILE_KEYS
    page, other_page = pages_of(first, longest, pages, TILE_KEYS, PAGE_SIZE)
    for tile in range(first, longest, TILE_KEYS):
        next_page, next_other = pages_of(tile + TILE_KEYS, longest, pages, TILE_KEYS, PAGE_SIZE)
        best, mass, total = absorb_common(
            tile, page, other_page, tile_queries, lengths, lows, longest, head_keys, head_values,
            pages, scale_log2, best, mass, total,
            TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, HAS_WINDOW, IS_E4M3,
        )  # fmt: skip
        page, other_page = next_page, next_other
    if IS_E4M3:
        total *= tl.load(value_scales + kv_head)
    attended = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(
        results + rows[:, None].to(tl.int64) * (NUM_KV_HEADS * NUM_GROUPS * HEAD_DIM)
        + heads[:, None] * HEAD_DIM + dims[None, :],
        attended.to(results.dtype.element_ty), mask=is_stored,
    )  # fmt: skip
