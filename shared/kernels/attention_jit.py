"""Triton kernels of paged attention on CUDA, for plain tokens, trees and prompt chunks.

If rows are few, a program of `attend_splits` computes a block of rows, one key head and some splits
of the key list, and writes one partial result per split; `combine` adds them in order. If blocks
fill the device, a program of `attend_whole` computes all splits of a block.

A row's bits depend only on its own query and key list. Splits are cut at fixed positions, each is
walked in tiles of fixed size, keys that a row does not see add exact zeros, and both kernels run
the same instructions for plain tokens and tree nodes. Chunks of prompts have a kernel of their own
and may differ from plain tokens in the last bits.

Source: Dao, arXiv 2307.08691 (online softmax over tiles); "Flash-Decoding", Dao et al., 2023
(splits of the key list).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.attention_walk_jit import (
    absorb_common,
    bounds_of_split,
    lanes_of,
    loaded_queries,
    lowest_keys,
    merged,
    pages_of,
    power_of_two,
    scaled,
    split_of,
    walk,
    walk_all,
    zeros,
)
from shared.kernels.dependent_jit import begin

# An index after every key.
FAR_KEYS = tl.constexpr(2**30)


@triton.jit(do_not_specialize=["page_stride", "tail_stride", "max_splits", "num_shared", "window"])  # type: ignore[untyped-decorator]
def attend_splits(  # type: ignore[no-untyped-def]
    queries, keys, values, key_scales, value_scales, sums, maxima, masses,
    block_sequences, block_first_rows, block_counts,
    row_lengths, shared_lengths, positions, page_table, tail_slots,
    query_stride, page_stride, tail_stride, max_splits, num_shared,
    scale_log2, window,
    HAS_TAIL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_E4M3: tl.constexpr,
    PARTS: tl.constexpr, OWN_ROWS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes sums `[N * ROWS, Hq, S, D]`, maxima and masses `[N * ROWS, Hq, S]` of N blocks.

    The first `num_shared` programs along the last axis compute a block's shared splits. With trees,
    one more program for every `OWN_ROWS` of its rows computes the splits with rows' own keys.
    """
    begin(IS_DEPENDENT)
    # Programs of neighbouring heads run together: their keys are neighbours in memory.
    block = tl.program_id(1)
    count = tl.load(block_counts + block)
    # Loaded before the branch, to wait for memory once, not twice.
    sequence = tl.load(block_sequences + block)
    first_row = tl.load(block_first_rows + block)
    if count == 0:
        return
    kv_head = tl.program_id(0)
    lane_rows, rows, heads = lanes_of(first_row, kv_head, NUM_GROUPS, TILE_ROWS)
    is_lane = lane_rows < count
    lengths = tl.load(row_lengths + rows, mask=is_lane, other=0)
    longest = tl.max(lengths, 0)
    common = tl.load(shared_lengths + sequence)
    split = tl.program_id(2)
    step = num_shared
    # Splits that end after this key are not shared by all rows; without trees all splits are.
    last_shared = FAR_KEYS
    own_row = 0
    num_own = 0
    if HAS_TAIL:
        has_own = common < longest
        # A program with `serves_row` computes some tree rows, from the first split with own keys.
        serves_row = split >= num_shared
        own_row = tl.maximum(split - num_shared, 0) * OWN_ROWS
        is_served = (lane_rows >= own_row) & (lane_rows < own_row + OWN_ROWS)
        is_lane = is_lane & ((not serves_row) | (has_own & is_served))
        num_own = tl.where(serves_row, tl.minimum(count - own_row, OWN_ROWS), 1)
        lengths = tl.where(is_lane, lengths, 0)
        longest = tl.max(lengths, 0)
        split = tl.where(serves_row, split_of(common, FIRST_SPLIT, LEVEL_SPLITS), split)
        step = tl.where(serves_row, 1, step)
        last_shared = tl.where(has_own & (not serves_row), common, FAR_KEYS)
    lows = lowest_keys(positions, rows, is_lane, window, lengths, HAS_WINDOW)
    tile_queries = loaded_queries(
        queries, rows, heads, is_lane, query_stride, HEAD_DIM, BLOCK_DIM, PARTS
    )
    if IS_E4M3:
        scale_log2 *= tl.load(key_scales + kv_head)
    pages = page_table + sequence * page_stride
    tails = tail_slots
    if HAS_TAIL:
        tails += first_row.to(tl.int64) * tail_stride
    lane_places = (block * ROWS + lane_rows) * (NUM_KV_HEADS * NUM_GROUPS) + heads
    first_slots = lane_places.to(tl.int64) * max_splits
    start, size = bounds_of_split(split, FIRST_SPLIT, LEVEL_SPLITS)
    while (start < longest) & (start + size <= last_shared):
        best, mass, total = walk(
            start, size, tile_queries, lane_rows, lengths, lows, is_lane, own_row, num_own,
            keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM, pages,
            row_lengths + first_row, positions + first_row, tails, tail_stride,
            common, window, scale_log2, HAS_TAIL, BLOCK_ROWS, TILE_ROWS, TILE_KEYS,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, HAS_WINDOW, IS_E4M3,
        )  # fmt: skip
        if IS_E4M3:
            total = scaled(total, tl.load(value_scales + kv_head))
        slots = first_slots + split
        tl.store(maxima + slots, best, mask=is_lane)
        tl.store(masses + slots, mass, mask=is_lane)
        store_parts(sums + slots[:, None] * HEAD_DIM, total, is_lane, HEAD_DIM, BLOCK_DIM)
        split += step
        start, size = bounds_of_split(split, FIRST_SPLIT, LEVEL_SPLITS)


@triton.jit(do_not_specialize=["max_splits"])  # type: ignore[untyped-decorator]
def combine(  # type: ignore[no-untyped-def]
    sums, maxima, masses, results, block_first_rows, block_counts, row_lengths, max_splits,
    ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds the partial results of one row and head, in the order of the splits."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    # Read before `begin`: kernels before `attend_splits`, which has waited for them, wrote these.
    count = tl.load(block_counts + place // ROWS)
    row = tl.load(block_first_rows + place // ROWS) + place % ROWS
    is_row = place % ROWS < count
    length = tl.load(row_lengths + row, mask=is_row, other=0)
    begin(IS_DEPENDENT)
    if not is_row:
        return
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    best = tl.full([], float("-inf"), tl.float32)
    mass = tl.zeros([], tl.float32)
    total = tl.zeros([BLOCK_DIM], tl.float32)
    slot = (place * NUM_HEADS + head).to(tl.int64) * max_splits
    start = 0
    size = FIRST_SPLIT
    while start < length:
        splits = tl.arange(0, LEVEL_SPLITS)
        is_split = start + splits * size < length
        parts = tl.load(maxima + slot + splits, mask=is_split, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(parts, 0))
        keep = power_of_two(best, new_best)
        mass *= keep
        total *= keep
        # Unrolled, so that all loads are in flight together.
        for split in tl.static_range(LEVEL_SPLITS):
            is_split = start + split * size < length
            part_best = tl.load(maxima + slot + split, mask=is_split, other=float("-inf"))
            part_mass = tl.load(masses + slot + split, mask=is_split, other=0.0)
            part_total = tl.load(
                sums + (slot + split) * HEAD_DIM + dims, mask=is_split & is_dim, other=0.0
            )
            weight = power_of_two(part_best, new_best)
            mass += part_mass * weight
            total += part_total * weight
        best = new_best
        slot += LEVEL_SPLITS
        start += LEVEL_SPLITS * size
        size *= 2
    attended = total / tl.where(mass == 0.0, 1.0, mass)
    tl.store(
        results + (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims,
        attended.to(results.dtype.element_ty), mask=is_dim,
    )  # fmt: skip


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
    # The last blocks see most keys; starting with them balances the load at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    count = tl.load(block_counts + block)
    if count == 0:
        return
    kv_head = tl.program_id(1)
    sequence = tl.load(block_sequences + block)
    first_row = tl.load(block_first_rows + block)
    lane_rows, rows, heads = lanes_of(first_row, kv_head, NUM_GROUPS, TILE_ROWS)
    is_lane = lane_rows < count
    tile_queries = loaded_queries(
        queries, rows, heads, is_lane, query_stride, HEAD_DIM, BLOCK_DIM, 1
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
    total = zeros(TILE_ROWS, BLOCK_DIM, 1)
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
        total = scaled(total, tl.load(value_scales + kv_head))
    places = rows.to(tl.int64) * (NUM_KV_HEADS * NUM_GROUPS * HEAD_DIM) + heads * HEAD_DIM
    store_attended(results + places[:, None], mass, total, is_lane, HEAD_DIM, BLOCK_DIM)


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
    ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_E4M3: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Computes the same bits as `attend_splits` and `combine`, if there are enough blocks to fill
    the device: one program computes all splits of a block and head, without partial results.

    A block that sees more than `CHAIN_KEYS` keys would run on alone, unless all key lists together
    are `fewest_programs` times as long. So the programs along the last axis share its splits, and
    the last one to end, by the `counters` `[N, Hkv]`, adds the parts.
    """
    block = tl.program_id(1)
    count = tl.load(block_counts + block)
    sequence = tl.load(block_sequences + block)
    first_row = tl.load(block_first_rows + block)
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
    # Returns only now: a branch on the number of rows would make all other loads wait for it.
    if (count == 0) | (is_chained & (program > 0)):
        return
    common = tl.load(shared_lengths + sequence)
    lows = lowest_keys(positions, rows, is_lane, window, lengths, HAS_WINDOW)
    # Loaded before the queries, which are waited for, and before the pages of further tiles.
    pages = page_table + sequence * page_stride
    lowest = tl.min(tl.where(is_lane, lows, longest), 0) // TILE_KEYS * TILE_KEYS
    page, other_page = pages_of(lowest, longest, pages, TILE_KEYS, PAGE_SIZE)
    tile_queries = loaded_queries(
        queries, rows, heads, is_lane, query_stride, HEAD_DIM, BLOCK_DIM, PARTS
    )
    value_scale = 1.0
    if IS_E4M3:
        scale_log2 *= tl.load(key_scales + kv_head)
        value_scale = tl.load(value_scales + kv_head)
    tails = tail_slots
    if HAS_TAIL:
        tails += first_row.to(tl.int64) * tail_stride
    head_keys = keys + kv_head * HEAD_DIM
    head_values = values + kv_head * HEAD_DIM
    if is_chained:
        mass, total = walk_all(
            tile_queries, lane_rows, lengths, lows, is_lane, count, head_keys, head_values,
            value_scale, lowest, page, other_page, pages, row_lengths + first_row,
            positions + first_row, tails, tail_stride, common, window, scale_log2,
            HAS_TAIL, BLOCK_ROWS, TILE_ROWS, TILE_KEYS, FIRST_SPLIT, LEVEL_SPLITS,
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
                HAS_TAIL, BLOCK_ROWS, TILE_ROWS, TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM,
                PAGE_SIZE, HAS_WINDOW, IS_E4M3,
            )  # fmt: skip
            slots = first_slots + split
            tl.store(maxima + slots, part_best, mask=is_lane)
            tl.store(masses + slots, part_mass, mask=is_lane)
            store_parts(
                sums + slots[:, None] * HEAD_DIM, scaled(part_total, value_scale), is_lane,
                HEAD_DIM, BLOCK_DIM,
            )  # fmt: skip
            split += tl.num_programs(2)
            start, size = bounds_of_split(split, FIRST_SPLIT, LEVEL_SPLITS)
        # All threads must have stored their parts before the program is counted as done.
        tl.debug_barrier()
        counter = counters + block * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") < tl.num_programs(2) - 1:
            return
        tl.store(counter, 0)  # for the next layer
        best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([TILE_ROWS], tl.float32)
        total = zeros(TILE_ROWS, BLOCK_DIM, PARTS)
        split = 0
        start = 0
        while start < longest:
            is_part = start < lengths
            slots = first_slots + split
            part_best = tl.load(maxima + slots, mask=is_part, other=float("-inf"))
            part_mass = tl.load(masses + slots, mask=is_part, other=0.0)
            part_total = ()
            for part in tl.static_range(PARTS):
                dims = part * (BLOCK_DIM // PARTS) + tl.arange(0, BLOCK_DIM // PARTS)
                places = slots[:, None] * HEAD_DIM + dims[None, :]
                is_stored = is_part[:, None] & (dims < HEAD_DIM)[None, :]
                part_total += (tl.load(sums + places, mask=is_stored, other=0.0),)
            best, mass, total = merged(best, mass, total, part_best, part_mass, part_total)
            start += FIRST_SPLIT << (split // LEVEL_SPLITS)
            split += 1
    places = rows.to(tl.int64) * (NUM_KV_HEADS * NUM_GROUPS * HEAD_DIM) + heads * HEAD_DIM
    store_attended(results + places[:, None], mass, total, is_lane, HEAD_DIM, BLOCK_DIM)


@triton.jit  # type: ignore[untyped-decorator]
def store_attended(  # type: ignore[no-untyped-def]
    lane_results, mass, total, is_lane, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Stores the weighted means of lanes, whose results begin at `lane_results` `[lanes, 1]`."""
    divisor = tl.where(mass == 0.0, 1.0, mass)[:, None]
    means = ()
    for part in tl.static_range(len(total)):
        mean = (total[part] / divisor).to(lane_results.dtype.element_ty)
        means += (mean,)  # type: ignore[assignment]
    store_parts(lane_results, means, is_lane, HEAD_DIM, BLOCK_DIM)


@triton.jit  # type: ignore[untyped-decorator]
def store_parts(  # type: ignore[no-untyped-def]
    lane_places, parts, is_lane, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Stores the dimensions of lanes, which begin at `lane_places` `[lanes, 1]`, part by part."""
    size: tl.constexpr = BLOCK_DIM // len(parts)
    for part in tl.static_range(len(parts)):
        dims = part * size + tl.arange(0, size)
        is_stored = is_lane[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(lane_places + dims[None, :], parts[part], mask=is_stored)


@triton.jit
def num_walked_keys(  # type: ignore[no-untyped-def]
    block_counts, block_first_rows, row_lengths
):
    """Returns the number of keys that the last rows of all blocks see, in int64."""
    places = tl.arange(0, 128)
    total = tl.zeros([128], tl.int64)
    for first in range(0, tl.num_programs(1), 128):
        blocks = first + places
        counts = tl.load(block_counts + blocks, mask=blocks < tl.num_programs(1), other=0)
        rows = tl.load(block_first_rows + blocks, mask=counts > 0, other=0) + counts - 1
        total += tl.load(row_lengths + rows, mask=counts > 0, other=0).to(tl.int64)
    return tl.sum(total, 0)
