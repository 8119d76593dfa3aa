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
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
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
        indices = tile + tl.arange(0, TILE_KEYS)
        is_key = indices < longest
        page = tl.load(pages + indices // PAGE_SIZE, mask=is_key, other=0)
        slots = page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE
        place = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
        is_loaded = is_key[:, None] & is_dim[None, :]
        raw_keys = tl.load(head_keys + place, mask=is_loaded, other=0)
        raw_values = tl.load(head_values + place, mask=is_loaded, other=0)
        is_seen = (indices[None, :] < lengths[:, None]) & (indices[None, :] >= lows[:, None])
        best, mass, total = absorb(
            tile_queries, raw_keys, raw_values, is_seen, scale_log2, best, mass, total, IS_E4M3
        )
    if HAS_TAIL:
        for row in range(first_own, first_own + num_own):
            is_own = is_lane & (lane_rows == row)
            length = tl.max(tl.where(is_own, lengths, 0), 0)
            low = tl.max(tl.where(is_own, lows, 0), 0)
            last = tl.minimum(end, length)
            for tile in range(tl.maximum(first, common_tiles), last, TILE_KEYS):
                indices = tile + tl.arange(0, TILE_KEYS)
                slots, is_key = own_slots(
                    pages, tails + row * tail_stride, indices, common, length, low, PAGE_SIZE
                )
                place = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
                is_loaded = is_key[:, None] & is_dim[None, :]
                raw_keys = tl.load(head_keys + place, mask=is_loaded, other=0)
                raw_values = tl.load(head_values + place, mask=is_loaded, other=0)
                best, mass, total = absorb(
                    tile_queries, raw_keys, raw_values, is_key[None, :] & is_own[:, None],
                    scale_log2, best, mass, total, IS_E4M3,
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
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
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
        indices = tile + tl.arange(0, TILE_KEYS)
        is_key = indices < longest
        page = tl.load(pages + indices // PAGE_SIZE, mask=is_key, other=0)
        slots = page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE
        place = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
        is_loaded = is_key[:, None] & is_dim[None, :]
        raw_keys = tl.load(head_keys + place, mask=is_loaded, other=0)
        raw_values = tl.load(head_values + place, mask=is_loaded, other=0)
        is_seen = (indices[None, :] < lengths[:, None]) & (indices[None, :] >= lows[:, None])
        part_best, part_mass, part_total = absorb(
            tile_queries, raw_keys, raw_values, is_seen, scale_log2,
            part_best, part_mass, part_total, IS_E4M3,
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
            is_own = is_lane & (lane_rows == row)
            length = tl.max(tl.where(is_own, lengths, 0), 0)
            low = tl.max(tl.where(is_own, lows, 0), 0)
            indices = tile + tl.arange(0, TILE_KEYS)
            slots, is_key = own_slots(
                pages, tails + row * tail_stride, indices, common, length, low, PAGE_SIZE
            )
            place = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
            is_loaded = is_key[:, None] & is_dim[None, :]
            raw_keys = tl.load(head_keys + place, mask=is_loaded, other=0)
            raw_values = tl.load(head_values + place, mask=is_loaded, other=0)
            part_best, part_mass, part_total = absorb(
                tile_queries, raw_keys, raw_values, is_key[None, :] & is_own[:, None], scale_log2,
                part_best, part_mass, part_total, IS_E4M3,
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
def own_slots(  # type: ignore[no-untyped-def]
    pages, row_tails, indices, common, length, low, PAGE_SIZE: tl.constexpr
):
    """Returns the slots of a tree row's keys, of its prefix or its tail, and which it sees."""
    is_prefix = (indices < common) & (indices >= low)
    is_tail = (indices >= common) & (indices < length)
    page = tl.load(pages + indices // PAGE_SIZE, mask=is_prefix, other=0)
    slots = tl.load(row_tails + indices - common, mask=is_tail, other=0)
    slots += tl.where(is_prefix, page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE, 0)
    return slots, is_prefix | is_tail


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
    queries, raw_keys, raw_values, is_seen, scale_log2, best, mass, total, IS_E4M3: tl.constexpr
):
    """Adds one tile to the running maximum, mass and sum; a row it is hidden from is unchanged."""
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
