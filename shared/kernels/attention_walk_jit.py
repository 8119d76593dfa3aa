"""Triton functions that walk a key list tile by tile, shared by the attention kernels.

Maxima are rounded up to whole numbers, so that sums are only scaled by powers of two, which is
exact. Splits are cut at fixed positions, and their partial results are added in order.

Source: Dao, arXiv 2307.08691 (online softmax over tiles).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.widened_jit import widened

# Keys that a warp loads at once, where it loads 64 bytes of each.
_STEP_KEYS = tl.constexpr(8)


@triton.jit
def merged(best, mass, total, part_best, part_mass, part_total):  # type: ignore[no-untyped-def]
    """Adds the partial result of one split to maxima, masses and sums."""
    new_best = tl.maximum(best, part_best)
    keep = power_of_two(best, new_best)
    weight = power_of_two(part_best, new_best)
    mass = mass * keep + part_mass * weight
    sums = ()
    for part in tl.static_range(len(total)):
        sums += (total[part] * keep[:, None] + part_total[part] * weight[:, None],)  # type: ignore[assignment]
    return new_best, mass, sums


@triton.jit  # type: ignore[untyped-decorator]
def zeros(  # type: ignore[no-untyped-def]
    TILE_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, PARTS: tl.constexpr
):
    """Returns sums of nothing, in PARTS parts of their dimensions."""
    sums = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros([TILE_ROWS, BLOCK_DIM // PARTS], tl.float32),)  # type: ignore[assignment]
    return sums


@triton.jit
def scaled(sums, factors):  # type: ignore[no-untyped-def]
    """Returns the parts of sums times factors: one, or one `[TILE_ROWS, 1]` for each row."""
    products = ()
    for part in tl.static_range(len(sums)):
        products += (sums[part] * factors,)  # type: ignore[assignment]
    return products


@triton.jit
def power_of_two(best, new_best):  # type: ignore[no-untyped-def]
    """Returns `2 ** (best - new_best)`, exactly, for maxima that are whole numbers or -inf.

    With whole maxima a sum is scaled without rounding. So a sum that is rescaled for each larger
    maximum has the same bits as one whose parts are all scaled by the final maximum, whether or not
    a compiler contracts product and sum.
    """
    exponent = tl.maximum(best - finite(new_best), -127.0)
    # The last bits of this sum are `exponent + 127`, without a conversion by slow units.
    return ((exponent + (127.0 + 2.0**23)).to(tl.int32, bitcast=True) << 23).to(
        tl.float32, bitcast=True
    )


@triton.jit
def finite(best):  # type: ignore[no-untyped-def]
    """Returns maxima, a large negative number instead of -inf: from that -inf can be subtracted."""
    return tl.maximum(best, -1e30)


@triton.jit  # type: ignore[untyped-decorator]
def bounds_of_split(  # type: ignore[no-untyped-def]
    split, FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr
):
    """Returns the first key of a split, and its number of keys."""
    size = FIRST_SPLIT << (split // LEVEL_SPLITS)
    return LEVEL_SPLITS * (size - FIRST_SPLIT) + split % LEVEL_SPLITS * size, size


@triton.jit  # type: ignore[untyped-decorator]
def split_of(  # type: ignore[no-untyped-def]
    key, FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr
):
    """Returns the index of the split that contains a key."""
    level_start = 0
    first = 0
    size = FIRST_SPLIT
    while key >= level_start + LEVEL_SPLITS * size:
        level_start += LEVEL_SPLITS * size
        first += LEVEL_SPLITS
        size *= 2
    return first + (key - level_start) // size


@triton.jit  # type: ignore[untyped-decorator]
def end_of_split(  # type: ignore[no-untyped-def]
    key, FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr
):
    """Returns the end of the split that contains a key, and its number of keys."""
    size = FIRST_SPLIT
    while key >= LEVEL_SPLITS * (2 * size - FIRST_SPLIT):
        size *= 2
    level_start = LEVEL_SPLITS * (size - FIRST_SPLIT)
    return level_start + ((key - level_start) & -size) + size, size


@triton.jit  # type: ignore[untyped-decorator]
def end_of_next_split(  # type: ignore[no-untyped-def]
    end, size, FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr
):
    """Returns the end and the number of keys of the split after the one that `end_of_split` gave,
    without a division."""
    is_last = end == LEVEL_SPLITS * (2 * size - FIRST_SPLIT)
    size = tl.where(is_last, 2 * size, size)
    return end + size, size


@triton.jit  # type: ignore[untyped-decorator]
def walk(  # type: ignore[no-untyped-def]
    start, size, tile_queries, lane_rows, lengths, lows, is_lane, first_own, num_own,
    head_keys, head_values, pages, block_lengths, block_positions, tails, tail_stride, common,
    window, scale_log2,
    HAS_TAIL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Returns maxima, masses and sums of one split, tile by tile.

    First come the tiles that are common to all rows, then the tiles with a row's own keys, for
    `num_own` rows of the block from `first_own` on: a tile of each row, then their next tiles.
    """
    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)
    total = zeros(TILE_ROWS, BLOCK_DIM, len(tile_queries))
    longest = tl.max(lengths, 0)
    lowest = tl.min(tl.where(is_lane, lows, longest), 0)
    end = tl.minimum(start + size, longest)
    first = tl.maximum(start, lowest // TILE_KEYS * TILE_KEYS)
    # Whole tiles before this key are common to all rows.
    common_tiles = common
    if HAS_TAIL:
        common_tiles = tl.where(common < longest, common // TILE_KEYS * TILE_KEYS, common)
    page, other_page = pages_of(first, longest, pages, TILE_KEYS, PAGE_SIZE)
    for tile in range(first, tl.minimum(end, common_tiles), TILE_KEYS):
        next_page, next_other = pages_of(tile + TILE_KEYS, longest, pages, TILE_KEYS, PAGE_SIZE)
        best, mass, total = absorb_common(
            tile, page, other_page, tile_queries, lengths, lows, longest, head_keys, head_values,
            pages, scale_log2, best, mass, total,
            TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, HAS_WINDOW, IS_E4M3,
        )  # fmt: skip
        page, other_page = next_page, next_other
    if HAS_TAIL:
        for tile in range(tl.maximum(first, common_tiles), end, TILE_KEYS):
            slots = own_slots(
                tile, first_own, num_own, pages, block_lengths, block_positions, tails,
                tail_stride, common, window, TILE_KEYS, BLOCK_ROWS, PAGE_SIZE, HAS_WINDOW,
            )  # fmt: skip
            for row in range(first_own, first_own + num_own):
                best, mass, total = absorb_own(
                    tile, slots, row, is_lane & (lane_rows == row), lengths, lows, tile_queries,
                    head_keys, head_values, common, scale_log2, best, mass, total,
                    TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, HAS_WINDOW, IS_E4M3,
                )  # fmt: skip
    return best, mass, total


@triton.jit  # type: ignore[untyped-decorator]
def walk_all(  # type: ignore[no-untyped-def]
    tile_queries, lane_rows, lengths, lows, is_lane, count, head_keys, head_values, value_scale,
    lowest, page, other_page, pages, block_lengths, block_positions, tails, tail_stride, common,
    window, scale_log2,
    HAS_TAIL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Returns masses and sums of all splits, added as `combine` adds them, from the tile that
    begins at key `lowest` and has the pages `page` and `other_page`.

    Both loops run over the tiles of all splits, so that the next tile is being loaded while one is
    computed.
    """
    longest = tl.max(lengths, 0)
    # Whole tiles before this key are common to all rows.
    common_tiles = common
    if HAS_TAIL:
        common_tiles = tl.where(common < longest, common // TILE_KEYS * TILE_KEYS, common)
    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)
    total = zeros(TILE_ROWS, BLOCK_DIM, len(tile_queries))
    part_best, part_mass, part_total = best, mass, total
    split_end, split_size = end_of_split(lowest, FIRST_SPLIT, LEVEL_SPLITS)
    for tile in range(lowest, tl.minimum(longest, common_tiles), TILE_KEYS):
        next_page, next_other = pages_of(tile + TILE_KEYS, longest, pages, TILE_KEYS, PAGE_SIZE)
        part_best, part_mass, part_total = absorb_common(
            tile, page, other_page, tile_queries, lengths, lows, longest, head_keys, head_values,
            pages, scale_log2, part_best, part_mass, part_total,
            TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, HAS_WINDOW, IS_E4M3,
        )  # fmt: skip
        page, other_page = next_page, next_other
        is_end = tile + TILE_KEYS >= split_end
        if is_end:
            best, mass, total = merged(
                best, mass, total, part_best, part_mass, scaled(part_total, value_scale)
            )
            part_best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            part_mass = tl.zeros([TILE_ROWS], tl.float32)
            # The sums are not reset: at a maximum of -inf, the next tile scales them by 0.
            split_end, split_size = end_of_next_split(
                split_end, split_size, FIRST_SPLIT, LEVEL_SPLITS
            )
    if HAS_TAIL:
        for tile in range(tl.maximum(lowest, common_tiles), longest, TILE_KEYS):
            slots = own_slots(
                tile, 0, count, pages, block_lengths, block_positions, tails,
                tail_stride, common, window, TILE_KEYS, BLOCK_ROWS, PAGE_SIZE, HAS_WINDOW,
            )  # fmt: skip
            for row in range(count):
                part_best, part_mass, part_total = absorb_own(
                    tile, slots, row, is_lane & (lane_rows == row), lengths, lows, tile_queries,
                    head_keys, head_values, common, scale_log2, part_best, part_mass, part_total,
                    TILE_KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, HAS_WINDOW, IS_E4M3,
                )  # fmt: skip
            is_end = tile + TILE_KEYS >= split_end
            if is_end:
                best, mass, total = merged(
                    best, mass, total, part_best, part_mass, scaled(part_total, value_scale)
                )
                part_best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
                part_mass = tl.zeros([TILE_ROWS], tl.float32)
                split_end, split_size = end_of_next_split(
                    split_end, split_size, FIRST_SPLIT, LEVEL_SPLITS
                )
    _, mass, total = merged(
        best, mass, total, part_best, part_mass, scaled(part_total, value_scale)
    )
    return mass, total


@triton.jit  # type: ignore[untyped-decorator]
def pages_of(  # type: ignore[no-untyped-def]
    tile, end, pages, TILE_KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    """Returns the pages of both halves of the tile that begins at key `tile`, if it is below `end`
    and a page holds whole halves.

    Loaded one tile ahead, so that the tile's loads do not wait for them.
    """
    page, other_page = 0, 0
    if PAGE_SIZE % (TILE_KEYS // 2) == 0:
        middle = tile + TILE_KEYS // 2
        page = tl.load(pages + tile // PAGE_SIZE, mask=tile < end, other=0)
        other_page = tl.load(pages + middle // PAGE_SIZE, mask=middle < end, other=0)
    return page, other_page


@triton.jit  # type: ignore[untyped-decorator]
def absorb_common(  # type: ignore[no-untyped-def]
    tile, page, other_page, queries, lengths, lows, longest, head_keys, head_values, pages,
    scale_log2, best, mass, total,
    TILE_KEYS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Adds the tile that begins at key `tile` of the page table, for every row that sees it.

    If a page holds whole halves of a tile, two scalars give the addresses of all its keys. A
    thread adds the offset of its first key, which is the same for every tile, and then constants,
    the multiples of `_STEP_KEYS`: neither costs a register for each key.
    """
    stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    half: tl.constexpr = TILE_KEYS // 2
    keys = tl.arange(0, TILE_KEYS)
    dims = tl.arange(0, BLOCK_DIM // len(queries))
    indices = tile + keys
    is_key = indices < longest
    if PAGE_SIZE % half == 0:
        first = (page.to(tl.int64) * PAGE_SIZE + tile % PAGE_SIZE) * stride
        other = (other_page.to(tl.int64) * PAGE_SIZE + (tile + half) % PAGE_SIZE) * stride
        is_first = (keys < half)[:, None]
        places = (keys % _STEP_KEYS * stride)[:, None] + dims[None, :]
        steps = (keys % half // _STEP_KEYS * (_STEP_KEYS * stride))[:, None]
        key_places = tl.where(is_first, head_keys + first, head_keys + other) + places + steps
        value_places = tl.where(is_first, head_values + first, head_values + other) + places + steps
    else:
        page_of_keys = tl.load(pages + indices // PAGE_SIZE, mask=is_key, other=0)
        slots = page_of_keys.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE
        places = slots[:, None] * stride + dims[None, :]
        key_places, value_places = head_keys + places, head_values + places
    is_seen = indices[None, :] < lengths[:, None]
    if HAS_WINDOW:
        is_seen = is_seen & (indices[None, :] >= lows[:, None])
    return absorb(
        queries, key_places, value_places, is_key, is_seen, scale_log2, best, mass, total,
        HEAD_DIM, BLOCK_DIM, IS_E4M3,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def own_slots(  # type: ignore[no-untyped-def]
    tile, first_own, num_own, pages, block_lengths, block_positions, tails, tail_stride,
    common, window,
    TILE_KEYS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Returns the slots `[BLOCK_ROWS, TILE_KEYS]` int32 of the tile that begins at key `tile` of
    the own lists of `num_own` tree rows from `first_own` on: the prefix, then a row's tail; -1
    where a row sees no key.

    Loaded for all rows at once, and none of the loads waits for another.
    """
    rows = tl.arange(0, BLOCK_ROWS)
    is_wanted = (rows >= first_own) & (rows < first_own + num_own)
    lengths = tl.load(block_lengths + rows, mask=is_wanted, other=0)
    indices = tile + tl.arange(0, TILE_KEYS)
    page = tl.load(pages + indices // PAGE_SIZE, mask=indices < common, other=0)
    prefix = page * PAGE_SIZE + indices % PAGE_SIZE
    # A row of `tails` is `tail_stride` wide, the row's own keys and then any.
    columns = indices - common
    is_column = is_wanted[:, None] & ((columns >= 0) & (columns < tail_stride))[None, :]
    places = rows[:, None] * tail_stride + columns[None, :]
    tail = tl.load(tails + places, mask=is_column, other=0).to(tl.int32)
    is_seen = indices[None, :] < lengths[:, None]
    if HAS_WINDOW:
        last = tl.load(block_positions + rows, mask=is_wanted, other=0).to(tl.int32)
        is_seen = is_seen & (
            (indices[None, :] > (last - window)[:, None]) | (columns >= 0)[None, :]
        )
    return tl.where(is_seen, tl.where((columns < 0)[None, :], prefix[None, :], tail), -1)


@triton.jit  # type: ignore[untyped-decorator]
def absorb_own(  # type: ignore[no-untyped-def]
    tile, slots, row, is_own, lengths, lows, queries, head_keys, head_values, common,
    scale_log2, best, mass, total,
    TILE_KEYS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Adds a tile of a tree row's own list for that row alone, whose slots are `slots[row]`."""
    is_row = tl.arange(0, slots.shape[0])[:, None] == row
    row_slots = tl.sum(tl.where(is_row, slots, 0), 0)
    # Which keys the row sees follows from its slots too, but those would have to be exchanged
    # between threads.
    indices = tile + tl.arange(0, TILE_KEYS)
    is_seen = (indices[None, :] < lengths[:, None]) & is_own[:, None]
    if HAS_WINDOW:
        is_seen = is_seen & ((indices[None, :] >= lows[:, None]) | (indices >= common)[None, :])
    places = row_slots.to(tl.int64)[:, None] * (NUM_KV_HEADS * HEAD_DIM)
    places += tl.arange(0, BLOCK_DIM // len(queries))[None, :]
    return absorb(
        queries, head_keys + places, head_values + places,
        row_slots >= 0, is_seen,
        scale_log2, best, mass, total, HEAD_DIM, BLOCK_DIM, IS_E4M3,
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
    queries, rows, heads, is_lane, query_stride,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Returns the queries of lanes, each a row and one of its heads, in PARTS parts of their
    dimensions; zero where not loaded."""
    size: tl.constexpr = BLOCK_DIM // PARTS
    places = rows[:, None].to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM
    loaded = ()
    for part in tl.static_range(PARTS):
        dims = part * size + tl.arange(0, size)
        is_loaded = is_lane[:, None] & (dims < HEAD_DIM)[None, :]
        part_queries = tl.load(queries + places + dims[None, :], mask=is_loaded, other=0.0)
        loaded += (part_queries,)  # type: ignore[assignment]
    return loaded


@triton.jit  # type: ignore[untyped-decorator]
def lowest_keys(  # type: ignore[no-untyped-def]
    positions, rows, is_lane, window, lengths, HAS_WINDOW: tl.constexpr
):
    """Returns the first key of each row's window. The window never hides keys of a tree's tail."""
    lows = tl.zeros_like(lengths)
    if HAS_WINDOW:
        last = tl.load(positions + rows, mask=is_lane, other=0).to(tl.int32)
        lows = tl.maximum(last - window + 1, 0)
    return lows


@triton.jit  # type: ignore[untyped-decorator]
def absorb(  # type: ignore[no-untyped-def]
    queries, key_places, value_places, is_key, is_seen, scale_log2, best, mass, total,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """Adds a tile of keys to the running maximum, mass and sum; rows that do not see the tile are
    unchanged.

    Dimensions are loaded and multiplied in the parts of `queries`, in order. `key_places` and
    `value_places` are those of the first part.
    """
    size: tl.constexpr = BLOCK_DIM // len(queries)
    is_loaded = is_key[:, None]
    scores = tl.zeros([queries[0].shape[0], is_key.shape[0]], tl.float32)
    for part in tl.static_range(len(queries)):
        if HEAD_DIM < BLOCK_DIM:
            is_loaded = is_key[:, None] & (part * size + tl.arange(0, size) < HEAD_DIM)[None, :]
        raw_keys = tl.load(key_places + part * size, mask=is_loaded, other=0)
        keys = matched(raw_keys, queries[part], IS_E4M3)
        scores = tl.dot(queries[part], tl.trans(keys), scores, input_precision="ieee")
    scores = tl.where(is_seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.ceil(tl.max(scores, 1) * scale_log2))
    decay = power_of_two(best, new_best)
    # An explicit fma rounds once in every kernel, whatever the compiler contracts.
    weights = tl.exp2(tl.fma(scores, scale_log2, -finite(new_best)[:, None]))
    mass = mass * decay + tl.sum(weights, 1)
    sums = ()
    for part in tl.static_range(len(queries)):
        if HEAD_DIM < BLOCK_DIM:
            is_loaded = is_key[:, None] & (part * size + tl.arange(0, size) < HEAD_DIM)[None, :]
        raw_values = tl.load(value_places + part * size, mask=is_loaded, other=0)
        values = matched(raw_values, queries[part], IS_E4M3)
        scaled_total = total[part] * decay[:, None]
        summed = tl.dot(weights.to(values.dtype), values, scaled_total, input_precision="ieee")
        sums += (summed,)  # type: ignore[assignment]
    return new_best, mass, sums


@triton.jit  # type: ignore[untyped-decorator]
def matched(raw, like, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns loaded keys or values, e4m3 loaded as int8, in the dtype of `like`."""
    return widened(raw, like) if IS_E4M3 else raw.to(like.dtype)
