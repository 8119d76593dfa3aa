"""Triton kernels of paged attention on CUDA.

Two kernels. `attend_splits` serves plain tokens and trees: a program takes a block of rows, one
key head and some splits of the key list, and leaves one partial result a split; `combine` adds
them in order. `attend_chunk` serves prompt chunks with larger blocks and no splits.

A row's bits depend on its own query and key list alone. Its splits are cut at fixed places, each
is walked in tiles of fixed size, keys hidden from it add exact zeros, and plain tokens and tree
nodes run the same instructions. Chunks do not: they may differ from plain tokens in the last bits.

Source: Dao, arXiv 2307.08691 (online softmax over tiles); "Flash-Decoding", Dao et al., 2023
(splits of the key list).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.dependent_jit import begin
from shared.kernels.widened_jit import widened


@triton.jit(do_not_specialize=["page_stride", "tail_stride", "max_splits", "num_shared", "window"])  # type: ignore[untyped-decorator]
def attend_splits(  # type: ignore[no-untyped-def]
    queries, keys, values, key_scales, value_scales, sums, maxima, masses,
    block_sequences, block_first_rows, block_counts,
    row_lengths, shared_lengths, positions, page_table, tail_slots,
    query_stride, page_stride, tail_stride, max_splits, num_shared,
    scale_log2, window,
    HAS_TAIL: tl.constexpr, ALL_SHARED: tl.constexpr, ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_E4M3: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes sums `[N * ROWS, Hq, S, D]`, maxima and masses `[N * ROWS, Hq, S]` of N blocks.

    The first `num_shared` programs along the last axis serve a block's shared splits; with trees,
    one more for each of its rows serves the splits where keys are the row's own.
    """
    begin(IS_DEPENDENT)
    # Heads run side by side: their parts of a key lie side by side in memory.
    block = tl.program_id(1)
    count = tl.load(block_counts + block)
    if count == 0:
        return
    kv_head = tl.program_id(0)
    sequence = tl.load(block_sequences + block)
    first_row = tl.load(block_first_rows + block)
    lanes = tl.arange(0, TILE_ROWS)
    lane_rows = lanes // NUM_GROUPS
    is_lane = lane_rows < count
    heads = kv_head * NUM_GROUPS + lanes % NUM_GROUPS
    rows = first_row + lane_rows
    lengths = tl.load(row_lengths + rows, mask=is_lane, other=0)
    longest = tl.max(lengths, 0)
    common = tl.load(shared_lengths + sequence)
    split = tl.program_id(2)
    step = num_shared
    # No split that ends behind it is shared by all rows; without trees every split is.
    last_shared = ALL_SHARED
    tails = tail_slots
    if HAS_TAIL:
        has_own = common < longest
        # Such a program serves one tree row, from the split on where its keys are its own.
        serves_row = split >= num_shared
        own_row = tl.maximum(split - num_shared, 0)
        is_lane = is_lane & ((not serves_row) | (has_own & (lane_rows == own_row)))
        lengths = tl.where(is_lane, lengths, 0)
        longest = tl.max(lengths, 0)
        tails += (first_row + own_row).to(tl.int64) * tail_stride
        own_split = split_of(common, FIRST_SPLIT, LEVEL_SPLITS)
        split = tl.where(serves_row, own_split, split)
        step = tl.where(serves_row, 1, num_shared)
        last_shared = tl.where(has_own & (not serves_row), common, ALL_SHARED)
    # The first key of each row's window. Tree nodes never lose a key of their own tail.
    lows = tl.zeros_like(lengths)
    if HAS_WINDOW:
        last = tl.load(positions + rows, mask=is_lane, other=0).to(tl.int32)
        lows = tl.maximum(last - window + 1, 0)
    lowest = tl.min(tl.where(is_lane, lows, longest), 0)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    tile_queries = tl.load(
        queries + rows[:, None].to(tl.int64) * query_stride
        + heads[:, None] * HEAD_DIM + dims[None, :],
        mask=is_lane[:, None] & is_dim[None, :], other=0.0,
    )  # fmt: skip
    if IS_E4M3:
        scale_log2 *= tl.load(key_scales + kv_head)
    pages = page_table + sequence * page_stride
    head_keys = keys + kv_head * HEAD_DIM + dims
    head_values = values + kv_head * HEAD_DIM + dims
    # Whole tiles below it are common to all rows.
    common_tiles = common
    if HAS_TAIL:
        common_tiles = tl.where(common < longest, common // TILE_KEYS * TILE_KEYS, common)
    size = FIRST_SPLIT << (split // LEVEL_SPLITS)
    start = LEVEL_SPLITS * (size - FIRST_SPLIT) + split % LEVEL_SPLITS * size
    while (start < longest) & (start + size <= last_shared):
        best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([TILE_ROWS], tl.float32)
        total = tl.zeros([TILE_ROWS, BLOCK_DIM], tl.float32)
        end = tl.minimum(start + size, longest)
        first = tl.maximum(start, lowest // TILE_KEYS * TILE_KEYS)
        for tile in range(first, tl.minimum(end, common_tiles), TILE_KEYS):
            indices = tile + tl.arange(0, TILE_KEYS)
            is_key = indices < longest
            page = tl.load(pages + indices // PAGE_SIZE, mask=is_key, other=0)
            offsets = (page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE) * (
                NUM_KV_HEADS * HEAD_DIM
            )
            is_loaded = is_key[:, None] & is_dim[None, :]
            tile_keys = tl.load(head_keys[None, :] + offsets[:, None], mask=is_loaded, other=0)
            tile_values = tl.load(head_values[None, :] + offsets[:, None], mask=is_loaded, other=0)
            tile_keys = matched(tile_keys, tile_queries, IS_E4M3)
            tile_values = matched(tile_values, tile_queries, IS_E4M3)
            scores = tl.dot(tile_queries, tl.trans(tile_keys), input_precision="ieee") * scale_log2
            is_seen = (indices[None, :] < lengths[:, None]) & (indices[None, :] >= lows[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
            best, mass, total = absorb(scores, tile_values, best, mass, total)
        if HAS_TAIL:
            for tile in range(tl.maximum(first, common_tiles), end, TILE_KEYS):
                indices = tile + tl.arange(0, TILE_KEYS)
                is_prefix = indices < common
                is_tail = (indices >= common) & (indices < longest)
                slots = tl.load(tails + indices - common, mask=is_tail, other=0)
                page = tl.load(pages + indices // PAGE_SIZE, mask=is_prefix, other=0)
                slots += tl.where(is_prefix, page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE, 0)
                offsets = slots * (NUM_KV_HEADS * HEAD_DIM)
                is_loaded = (is_prefix | is_tail)[:, None] & is_dim[None, :]
                tile_keys = tl.load(head_keys[None, :] + offsets[:, None], mask=is_loaded, other=0)
                tile_values = tl.load(
                    head_values[None, :] + offsets[:, None], mask=is_loaded, other=0
                )
                tile_keys = matched(tile_keys, tile_queries, IS_E4M3)
                tile_values = matched(tile_values, tile_queries, IS_E4M3)
                scores = (
                    tl.dot(tile_queries, tl.trans(tile_keys), input_precision="ieee") * scale_log2
                )
                is_seen = is_tail[None, :] | (
                    is_prefix[None, :] & (indices[None, :] >= lows[:, None])
                )
                scores = tl.where(is_seen & is_lane[:, None], scores, float("-inf"))
                best, mass, total = absorb(scores, tile_values, best, mass, total)
        if IS_E4M3:
            total *= tl.load(value_scales + kv_head)
        slot = ((block * ROWS + lane_rows) * (NUM_KV_HEADS * NUM_GROUPS) + heads).to(tl.int64)
        slot = slot * max_splits + split
        tl.store(maxima + slot, best, mask=is_lane)
        tl.store(masses + slot, mass, mask=is_lane)
        tl.store(
            sums + slot[:, None] * HEAD_DIM + dims[None, :], total,
            mask=is_lane[:, None] & is_dim[None, :],
        )  # fmt: skip
        split += step
        size = FIRST_SPLIT << (split // LEVEL_SPLITS)
        start = LEVEL_SPLITS * (size - FIRST_SPLIT) + split % LEVEL_SPLITS * size


@triton.jit  # type: ignore[untyped-decorator]
def split_of(  # type: ignore[no-untyped-def]
    key, FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr
):
    """Returns the index of the split that holds a key."""
    level_start = 0
    first = 0
    size = FIRST_SPLIT
    while key >= level_start + LEVEL_SPLITS * size:
        level_start += LEVEL_SPLITS * size
        first += LEVEL_SPLITS
        size *= 2
    return first + (key - level_start) // size


@triton.jit
def absorb(scores, values, best, mass, total):  # type: ignore[no-untyped-def]
    """Adds one tile to the running maximum, mass and sum; a row it is hidden from is unchanged."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    reference = tl.where(new_best == float("-inf"), 0.0, new_best)
    decay = tl.exp2(best - reference)
    weights = tl.exp2(scores - reference[:, None])
    mass = mass * decay + tl.sum(weights, 1)
    total = total * decay[:, None]
    total = tl.dot(weights.to(values.dtype), values, total, input_precision="ieee")
    return new_best, mass, total


@triton.jit  # type: ignore[untyped-decorator]
def matched(raw, like, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns keys or values as loaded, e4m3 as int8, in the dtype of `like`."""
    return widened(raw, like) if IS_E4M3 else raw.to(like.dtype)


@triton.jit(do_not_specialize=["max_splits"])  # type: ignore[untyped-decorator]
def combine(  # type: ignore[no-untyped-def]
    sums, maxima, masses, results, block_first_rows, block_counts, row_lengths, max_splits,
    ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds the partial results of one row and head, one level of splits at a time."""
    begin(IS_DEPENDENT)
    place = tl.program_id(0)
    head = tl.program_id(1)
    if place % ROWS >= tl.load(block_counts + place // ROWS):
        return
    row = tl.load(block_first_rows + place // ROWS) + place % ROWS
    length = tl.load(row_lengths + row)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    best = tl.full([], float("-inf"), tl.float32)
    mass = tl.zeros([], tl.float32)
    total = tl.zeros([BLOCK_DIM], tl.float32)
    first = 0
    start = 0
    size = FIRST_SPLIT
    while start < length:
        splits = tl.arange(0, LEVEL_SPLITS)
        is_split = start + splits * size < length
        slots = (place * NUM_HEADS + head).to(tl.int64) * max_splits + first + splits
        parts = tl.load(maxima + slots, mask=is_split, other=float("-inf"))
        part_masses = tl.load(masses + slots, mask=is_split, other=0.0)
        part_sums = tl.load(
            sums + slots[:, None] * HEAD_DIM + dims[None, :],
            mask=is_split[:, None] & is_dim[None, :], other=0.0,
        )  # fmt: skip
        new_best = tl.maximum(best, tl.max(parts, 0))
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay = tl.exp2(best - reference)
        weights = tl.exp2(parts - reference)
        mass = mass * decay + tl.sum(weights * part_masses, 0)
        total = total * decay + tl.sum(weights[:, None] * part_sums, 0)
        best = new_best
        first += LEVEL_SPLITS
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
    # The last blocks see most keys; starting with them evens out the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    count = tl.load(block_counts + block)
    if count == 0:
        return
    kv_head = tl.program_id(1)
    sequence = tl.load(block_sequences + block)
    lanes = tl.arange(0, TILE_ROWS)
    is_lane = lanes // NUM_GROUPS < count
    heads = kv_head * NUM_GROUPS + lanes % NUM_GROUPS
    rows = tl.load(block_first_rows + block) + lanes // NUM_GROUPS
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    is_stored = is_lane[:, None] & is_dim[None, :]
    tile_queries = tl.load(
        queries + rows[:, None].to(tl.int64) * query_stride
        + heads[:, None] * HEAD_DIM + dims[None, :],
        mask=is_stored, other=0.0,
    )  # fmt: skip
    lengths = tl.load(row_lengths + rows, mask=is_lane, other=0)
    lows = tl.zeros_like(lengths)
    if HAS_WINDOW:
        last = tl.load(positions + rows, mask=is_lane, other=0).to(tl.int32)
        lows = tl.maximum(last - window + 1, 0)
    longest = tl.max(lengths, 0)
    lowest = tl.min(tl.where(is_lane, lows, longest), 0)
    if IS_E4M3:
        scale_log2 *= tl.load(key_scales + kv_head)
    pages = page_table + sequence * page_stride
    head_keys = keys + kv_head * HEAD_DIM + dims
    head_values = values + kv_head * HEAD_DIM + dims
    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)
    total = tl.zeros([TILE_ROWS, BLOCK_DIM], tl.float32)
    for tile in range(lowest // TILE_KEYS * TILE_KEYS, longest, TILE_KEYS):
        indices = tile + tl.arange(0, TILE_KEYS)
        is_key = indices < longest
        page = tl.load(pages + indices // PAGE_SIZE, mask=is_key, other=0)
        offsets = (page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        is_loaded = is_key[:, None] & is_dim[None, :]
        tile_keys = tl.load(head_keys[None, :] + offsets[:, None], mask=is_loaded, other=0)
        tile_values = tl.load(head_values[None, :] + offsets[:, None], mask=is_loaded, other=0)
        tile_keys = matched(tile_keys, tile_queries, IS_E4M3)
        tile_values = matched(tile_values, tile_queries, IS_E4M3)
        scores = tl.dot(tile_queries, tl.trans(tile_keys), input_precision="ieee") * scale_log2
        is_seen = (indices[None, :] < lengths[:, None]) & (indices[None, :] >= lows[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        best, mass, total = absorb(scores, tile_values, best, mass, total)
    if IS_E4M3:
        total *= tl.load(value_scales + kv_head)
    attended = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(
        results + rows[:, None].to(tl.int64) * (NUM_KV_HEADS * NUM_GROUPS * HEAD_DIM)
        + heads[:, None] * HEAD_DIM + dims[None, :],
        attended.to(results.dtype.element_ty), mask=is_stored,
    )  # fmt: skip
