"""Triton kernel of paged attention where blocks of rows fill the device.

It has the bits of the kernels in `attention_jit`, which says why, and spares them the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.attention_parts_jit import bounds_of_split, merged
from shared.kernels.attention_walk_jit import lanes_of, loaded_queries, lowest_keys, walk, walk_all


@triton.jit(do_not_specialize=[  # type: ignore[untyped-decorator]
    "page_stride", "tail_stride", "max_splits", "window", "fewest_programs",
])  # fmt: skip
def attend_whole(  # type: ignore[no-untyped-def]
    queries, keys, values, key_scales, value_scales, results, sums, maxima, masses, counters,
    block_sequences, block_first_rows, block_counts,
    row_lengths, shared_lengths, positions, page_table, tail_slots,
    query_stride, page_stride, tail_stride, max_splits, scale_log2, window,
    fewest_programs,
    HAS_TAIL: tl.constexpr, CHAIN_KEYS: tl.constexpr,
    ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Does what `attend_splits` and `combine` do, with the same bits, for blocks that are enough
    to fill the device: a program takes all splits of a block and head, and leaves no parts.

    A block that sees more than `CHAIN_KEYS` keys would keep the device waiting, unless all lists
    together fill `fewest_programs` of its length. Programs along the last axis share its splits,
    and the one that is done last, which `counters` `[N, Hkv]` tell, adds the parts.
    """
    block = tl.program_id(1)
    count = tl.load(block_counts + block)
    # Not behind the branch, which would make two waits of one.
    sequence = tl.load(block_sequences + block)
    first_row = tl.load(block_first_rows + block)
    if count == 0:
        return
    program = tl.program_id(2)
    kv_head = tl.program_id(0)
    lane_rows, rows, heads = lanes_of(first_row, kv_head, NUM_GROUPS, TILE_ROWS)
    is_lane = lane_rows < count
    lengths = tl.load(row_lengths + rows, mask=is_lane, other=0)
    longest = tl.max(lengths, 0)
    is_chained = longest <= CHAIN_KEYS
    if not is_chained:
        num_keys = num_walked_keys(block_counts, block_first_rows, row_lengths) * NUM_KV_HEADS
        is_chained = longest.to(tl.int64) * fewest_programs <= num_keys
    if is_chained & (program > 0):
        return
    common = tl.load(shared_lengths + sequence)
    lows = lowest_keys(positions, rows, is_lane, window, lengths, HAS_WINDOW)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    is_stored = is_lane[:, None] & is_dim[None, :]
    tile_queries = loaded_queries(
        queries, rows, heads, is_stored, query_stride, HEAD_DIM, BLOCK_DIM
    )
    value_scale = 1.0
    if IS_E4M3:
        scale_log2 *= tl.load(key_scales + kv_head)
        value_scale = tl.load(value_scales + kv_head)
    pages = page_table + sequence * page_stride
    tails = tail_slots
    if HAS_TAIL:
        tails += first_row.to(tl.int64) * tail_stride
    head_keys = keys + kv_head * HEAD_DIM
    head_values = values + kv_head * HEAD_DIM
    if is_chained:
        mass, total = walk_all(
            tile_queries, lane_rows, lengths, lows, is_lane, count, head_keys, head_values,
            value_scale, pages, row_lengths + first_row, positions + first_row, tails, tail_stride,
            common, window, scale_log2, HAS_TAIL, TILE_ROWS, TILE_KEYS, FIRST_SPLIT, LEVEL_SPLITS,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, HAS_WINDOW, IS_E4M3,
        )  # fmt: skip
    else:
        lane_places = (block * ROWS + lane_rows) * (NUM_KV_HEADS * NUM_GROUPS) + heads
        first_slots = lane_places.to(tl.int64) * max_splits
        split = program
        start, size = bounds_of_split(split, FIRST_SPLIT, LEVEL_SPLITS)
        while start < longest:
            part_best, part_mass, part_total = walk(
                start, size, tile_queries, lane_rows, lengths, lows, is_lane, 0, count,
                head_keys, head_values, pages, row_lengths + first_row, positions + first_row,
                tails, tail_stride, common, window, scale_log2,
                HAS_TAIL, TILE_ROWS, TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM,
                PAGE_SIZE, HAS_WINDOW, IS_E4M3,
            )  # fmt: skip
            slots = first_slots + split
            tl.store(maxima + slots, part_best, mask=is_lane)
            tl.store(masses + slots, part_mass, mask=is_lane)
            places = slots[:, None] * HEAD_DIM + dims[None, :]
            tl.store(sums + places, part_total * value_scale, mask=is_stored)
            split += tl.num_programs(2)
            start, size = bounds_of_split(split, FIRST_SPLIT, LEVEL_SPLITS)
        # All threads have stored before one of them counts the program.
        tl.debug_barrier()
        counter = counters + block * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") < tl.num_programs(2) - 1:
            return
        tl.store(counter, 0)  # for the next layer
        best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([TILE_ROWS], tl.float32)
        total = tl.zeros([TILE_ROWS, BLOCK_DIM], tl.float32)
        split = 0
        start = 0
        while start < longest:
            is_part = start < lengths
            slots = first_slots + split
            part_best = tl.load(maxima + slots, mask=is_part, other=float("-inf"))
            part_mass = tl.load(masses + slots, mask=is_part, other=0.0)
            places = slots[:, None] * HEAD_DIM + dims[None, :]
            part_total = tl.load(sums + places, mask=is_part[:, None] & is_dim[None, :], other=0.0)
            best, mass, total = merged(best, mass, total, part_best, part_mass, part_total)
            start += FIRST_SPLIT << (split // LEVEL_SPLITS)
            split += 1
    attended = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(
        results + rows[:, None].to(tl.int64) * (NUM_KV_HEADS * NUM_GROUPS * HEAD_DIM)
        + heads[:, None] * HEAD_DIM + dims[None, :],
        attended.to(results.dtype.element_ty), mask=is_stored,
    )  # fmt: skip


@triton.jit
def num_walked_keys(  # type: ignore[no-untyped-def]
    block_counts, block_first_rows, row_lengths
):
    """Returns how many keys the last rows of all blocks see, in int64."""
    places = tl.arange(0, 128)
    total = tl.zeros([128], tl.int64)
    for first in range(0, tl.num_programs(1), 128):
        blocks = first + places
        counts = tl.load(block_counts + blocks, mask=blocks < tl.num_programs(1), other=0)
        rows = tl.load(block_first_rows + blocks, mask=counts > 0, other=0) + counts - 1
        total += tl.load(row_lengths + rows, mask=counts > 0, other=0).to(tl.int64)
    return tl.sum(total, 0)
