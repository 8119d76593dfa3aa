"""Triton functions that walk a key list tile by tile: what the kernels of attention share.

Maxima are rounded up to whole numbers, so that sums are only ever scaled by powers of two, which
rounds nothing: see `attention_parts_jit`.

Source: Dao, arXiv 2307.08691 (online softmax over tiles).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.attention_parts_jit import end_of_split, merged, power_of_two
from shared.kernels.widened_jit import widened


@triton.jit  # type: ignore[untyped-decorator]
def walk(  # type: ignore[no-untyped-def]
    start, size, tile_queries, lane_rows, lengths, lows, is_lane, first_own, num_own,
    head_keys, head_values, pages, tails, tail_stride, common, scale_log2,
    HAS_TAIL: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Returns maxima, masses and sums of one split, tile by tile.

    Tiles that are common to all rows come first, then, one row after the other, those that hold
    keys of its own, for `num_own` rows of the block from `first_own` on.
    """
    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)
    total = tl.zeros([TILE_ROWS, BLOCK_DIM], tl.float32)
    longest = tl.max(lengths, 0)
    lowest = tl.min(tl.where(is_lane, lows, longest), 0)
    end = tl.minimum(start + size, longest)
    first = tl.maximum(start, lowest // TILE_KEYS * TILE_KEYS)
    # Whole tiles below it are common to all rows.
    common_tiles = common
    if HAS_TAIL:
        common_tiles = tl.where(common < longest, common // TILE_KEYS * TILE_KEYS, common)
    for tile in range(first, tl.minimum(end, common_tiles), TILE_KEYS):
        best, mass, total = absorb_common(
            tile, tile_queries, lengths, lows, longest, head_keys, head_values, pages, scale_log2,
            best, mass, total, TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, IS_E4M3,
        )  # fmt: skip
    if HAS_TAIL:
        for row in range(first_own, first_own + num_own):
            is_own, length, low = own_bounds(row, lane_rows, is_lane, lengths, lows)
            for tile in range(tl.maximum(first, common_tiles), tl.minimum(end, length), TILE_KEYS):
                best, mass, total = absorb_own(
                    tile, tile_queries, is_own, length, low,
                    head_keys, head_values, pages, tails + row * tail_stride, common, scale_log2,
                    best, mass, total,
                    TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, IS_E4M3,
                )  # fmt: skip
    return best, mass, total


@triton.jit  # type: ignore[untyped-decorator]
def walk_all(  # type: ignore[no-untyped-def]
    tile_queries, lane_rows, lengths, lows, is_lane, count, head_keys, head_values, value_scale,
    pages, tails, tail_stride, common, scale_log2,
    HAS_TAIL: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Returns masses and sums of all splits, added as `combine` adds them.

    Both loops run over tiles, whatever split they belong to, so that the loads of the next tile
    are under way while one is computed.
    """
    longest = tl.max(lengths, 0)
    lowest = tl.min(tl.where(is_lane, lows, longest), 0) // TILE_KEYS * TILE_KEYS
    # Whole tiles below it are common to all rows.
    common_tiles = common
    if HAS_TAIL:
        common_tiles = tl.where(common < longest, common // TILE_KEYS * TILE_KEYS, common)
    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)
    total = tl.zeros([TILE_ROWS, BLOCK_DIM], tl.float32)
    part_best, part_mass, part_total = best, mass, total
    split_end = end_of_split(lowest, FIRST_SPLIT, LEVEL_SPLITS)
    for tile in range(lowest, tl.minimum(longest, common_tiles), TILE_KEYS):
        part_best, part_mass, part_total = absorb_common(
            tile, tile_queries, lengths, lows, longest, head_keys, head_values, pages, scale_log2,
            part_best, part_mass, part_total,
            TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, IS_E4M3,
        )  # fmt: skip
        is_end = tile + TILE_KEYS >= split_end
        if is_end:
            best, mass, total = merged(
                best, mass, total, part_best, part_mass, part_total * value_scale
            )
            part_best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            part_mass = tl.zeros([TILE_ROWS], tl.float32)
            part_total = tl.zeros([TILE_ROWS, BLOCK_DIM], tl.float32)
            split_end = end_of_split(tile + TILE_KEYS, FIRST_SPLIT, LEVEL_SPLITS)
    if HAS_TAIL:
        first = tl.maximum(lowest, common_tiles)
        num_tiles = tl.maximum(longest - first + TILE_KEYS - 1, 0) // TILE_KEYS
        # A tile of every row, then the next one.
        for step in range(num_tiles * count):
            row = step % count
            tile = first + step // count * TILE_KEYS
            is_own, length, low = own_bounds(row, lane_rows, is_lane, lengths, lows)
            part_best, part_mass, part_total = absorb_own(
                tile, tile_queries, is_own, length, low,
                head_keys, head_values, pages, tails + row * tail_stride, common, scale_log2,
                part_best, part_mass, part_total,
                TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, IS_E4M3,
            )  # fmt: skip
            is_end = (row == count - 1) & (tile + TILE_KEYS >= split_end)
            if is_end:
                best, mass, total = merged(
                    best, mass, total, part_best, part_mass, part_total * value_scale
                )
                part_best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
                part_mass = tl.zeros([TILE_ROWS], tl.float32)
                part_total = tl.zeros([TILE_ROWS, BLOCK_DIM], tl.float32)
                split_end = end_of_split(tile + TILE_KEYS, FIRST_SPLIT, LEVEL_SPLITS)
    _, mass, total = merged(best, mass, total, part_best, part_mass, part_total * value_scale)
    return mass, total


@triton.jit  # type: ignore[untyped-decorator]
def absorb_common(  # type: ignore[no-untyped-def]
    tile, queries, lengths, lows, longest, head_keys, head_values, pages, scale_log2,
    best, mass, total,
    TILE_KEYS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Adds the tile that begins at key `tile` of the page table, for every row that sees it."""
    indices = tile + tl.arange(0, TILE_KEYS)
    is_key = indices < longest
    page = tl.load(pages + indices // PAGE_SIZE, mask=is_key, other=0)
    slots = page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE
    is_seen = (indices[None, :] < lengths[:, None]) & (indices[None, :] >= lows[:, None])
    return absorb(
        queries, head_keys, head_values, slots, is_key, is_seen, scale_log2, best, mass, total,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, IS_E4M3,
    )  # fmt: skip


@triton.jit
def own_bounds(row, lane_rows, is_lane, lengths, lows):  # type: ignore[no-untyped-def]
    """Returns which lanes are a row's, how many keys it has, and the first of its window."""
    is_own = is_lane & (lane_rows == row)
    return is_own, tl.max(tl.where(is_own, lengths, 0), 0), tl.max(tl.where(is_own, lows, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def absorb_own(  # type: ignore[no-untyped-def]
    tile, queries, is_own, length, low, head_keys, head_values, pages, row_tails, common,
    scale_log2, best, mass, total,
    TILE_KEYS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Adds the tile that begins at key `tile` of a tree row's own list, its prefix and then its
    tail, for that row alone."""
    indices = tile + tl.arange(0, TILE_KEYS)
    is_prefix = (indices < common) & (indices >= low)
    is_tail = (indices >= common) & (indices < length)
    is_key = is_prefix | is_tail
    page = tl.load(pages + indices // PAGE_SIZE, mask=is_prefix, other=0)
    slots = tl.load(row_tails + indices - common, mask=is_tail, other=0)
    slots += tl.where(is_prefix, page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE, 0)
    return absorb(
        queries, head_keys, head_values, slots, is_key, is_key[None, :] & is_own[:, None],
        scale_log2, best, mass, total, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, IS_E4M3,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def lanes_of(  # type: ignore[no-untyped-def]
    first_row, kv_head, NUM_GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr
):
    """Returns the row within the block, the row and the query head of each lane of a tile."""
    lanes = tl.arange(0, TILE_ROWS)
    lane_rows = lanes // NUM_GROUPS
    return lane_rows, first_row + lane_rows, kv_head * NUM_GROUPS + lanes % NUM_GROUPS


@triton.jit  # type: ignore[untyped-decorator]
def loaded_queries(  # type: ignore[no-untyped-def]
    queries, rows, heads, is_loaded, query_stride, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Returns the queries of lanes, each a row and one of its heads, zero where not loaded."""
    places = rows[:, None].to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM
    return tl.load(queries + places + tl.arange(0, BLOCK_DIM)[None, :], mask=is_loaded, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def lowest_keys(  # type: ignore[no-untyped-def]
    positions, rows, is_lane, window, lengths, HAS_WINDOW: tl.constexpr
):
    """Returns the first key of each row's window. Tree nodes never lose a key of their tail."""
    lows = tl.zeros_like(lengths)
    if HAS_WINDOW:
        last = tl.load(positions + rows, mask=is_lane, other=0).to(tl.int32)
        lows = tl.maximum(last - window + 1, 0)
    return lows


@triton.jit  # type: ignore[untyped-decorator]
def absorb(  # type: ignore[no-untyped-def]
    queries, head_keys, head_values, slots, is_key, is_seen, scale_log2, best, mass, total,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Adds a tile of keys to the running maximum, mass and sum; a row it is hidden from is
    unchanged."""
    dims = tl.arange(0, BLOCK_DIM)
    places = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
    is_loaded = is_key[:, None] & (dims < HEAD_DIM)[None, :]
    raw_keys = tl.load(head_keys + places, mask=is_loaded, other=0)
    raw_values = tl.load(head_values + places, mask=is_loaded, other=0)
    keys = matched(raw_keys, queries, IS_E4M3)
    values = matched(raw_values, queries, IS_E4M3)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
    scores = tl.where(is_seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.ceil(tl.max(scores, 1)))
    reference = tl.where(new_best == float("-inf"), 0.0, new_best)
    decay = power_of_two(best, new_best)
    weights = tl.exp2(scores - reference[:, None])
    mass = mass * decay + tl.sum(weights, 1)
    total = total * decay[:, None]
    total = tl.dot(weights.to(values.dtype), values, total, input_precision="ieee")
    return new_best, mass, total


@triton.jit  # type: ignore[untyped-decorator]
def matched(raw, like, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns keys or values as loaded, e4m3 as int8, in the dtype of `like`."""
    return widened(raw, like) if IS_E4M3 else raw.to(like.dtype)
