"""Triton kernels of latent attention over a paged cache, in absorbed form, for plain tokens and
trees.

A program loads a tile of the cache once for up to 64 lanes; a lane is a row and one of its query
heads. The tile's latent vectors are both keys and values; its rotated keys add to the scores. In
models with few heads, rows of a tree share a program, and so the loads of their common prefix.

A row's bits depend only on its own queries and key list. The list is cut at fixed positions
(`bounds_of_split`), each split is walked in tiles of one size, and splits are added in order.
Maxima are whole numbers, so that sums are scaled by powers of two, which is exact, and a tile that
a row does not see adds exact zeros.

Sources: DeepSeek-V2, arXiv 2405.04434, section 2.1 (absorbed matrices); Dao, arXiv 2307.08691
(online softmax over tiles); "Flash-Decoding", Dao et al., 2023 (splits of the key list).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.attention_walk_jit import bounds_of_split, power_of_two
from shared.kernels.dependent_jit import begin
from shared.kernels.fused_jit import normed_row, summed


@triton.jit(do_not_specialize=["page_stride", "tail_stride", "max_splits"])  # type: ignore[untyped-decorator]
def attend_latents(  # type: ignore[no-untyped-def]
    queries, cache, sums, maxima, masses,
    block_sequences, block_first_rows, block_counts,
    row_lengths, shared_lengths, page_table, tail_slots,
    page_stride, tail_stride, max_splits, scale_log2,
    HAS_TAIL: tl.constexpr, NUM_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr,
    LATENT: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_LATENT: tl.constexpr, BLOCK_ROTARY: tl.constexpr,
    PAGE_SIZE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attends from a block of rows and some of their heads; programs along the last axis share
    the splits of a block, and `combine_latents` adds the parts.

    Args:
        queries: `[T, H, L + R]`, the last R dimensions rotated.
        cache: `[num_slots, L + R]`.
        sums: `[N * ROWS, H, S, L]` float32, with `maxima` and `masses` `[N * ROWS, H, S]`, the
            parts of S splits.
    """
    begin(IS_DEPENDENT)
    block = tl.program_id(1)
    count = tl.load(block_counts + block)
    # Loaded before the branch, to wait for memory once, not twice.
    sequence = tl.load(block_sequences + block)
    first_row = tl.load(block_first_rows + block)
    if count == 0:
        return
    lanes = tl.arange(0, ROWS * BLOCK_HEADS)
    lane_rows, heads = lanes // BLOCK_HEADS, tl.program_id(0) * BLOCK_HEADS + lanes % BLOCK_HEADS
    rows = first_row + lane_rows
    is_lane = (lane_rows < count) & (heads < NUM_HEADS)
    lengths = tl.load(row_lengths + rows, mask=is_lane, other=0)
    longest = tl.max(lengths, 0)
    common = tl.load(shared_lengths + sequence)
    split = tl.program_id(2)
    start, size = bounds_of_split(split, FIRST_SPLIT, LEVEL_SPLITS)
    if start >= longest:
        return
    dims, rotary = tl.arange(0, BLOCK_LATENT), tl.arange(0, BLOCK_ROTARY)
    is_dim = is_lane[:, None]
    is_rotary = is_dim
    if LATENT < BLOCK_LATENT:
        is_dim = is_dim & (dims < LATENT)[None, :]
    if ROTARY < BLOCK_ROTARY:
        is_rotary = is_rotary & (rotary < ROTARY)[None, :]
    lane_queries = queries + (rows.to(tl.int64) * NUM_HEADS + heads)[:, None] * (LATENT + ROTARY)
    straight = tl.load(lane_queries + dims[None, :], mask=is_dim, other=0.0)
    turned = tl.load(lane_queries + LATENT + rotary[None, :], mask=is_rotary, other=0.0)
    pages = page_table + sequence * page_stride
    # Whole tiles before this key have the same keys for all rows.
    common_tiles = common
    tails, own_lengths = tail_slots, row_lengths + first_row
    if HAS_TAIL:
        common_tiles = tl.where(common < longest, common // TILE_KEYS * TILE_KEYS, common)
        tails += first_row.to(tl.int64) * tail_stride
    places = ((block * ROWS + lane_rows) * NUM_HEADS + heads).to(tl.int64) * max_splits
    while start < longest:
        best, mass, total = walk_latents(
            start, size, straight, turned, lane_rows, lengths, longest, count, cache, pages,
            own_lengths, tails, tail_stride, common, common_tiles, scale_log2,
            HAS_TAIL, ROWS, ROWS * BLOCK_HEADS, TILE_KEYS, LATENT, ROTARY,
            BLOCK_LATENT, BLOCK_ROTARY, PAGE_SIZE,
        )  # fmt: skip
        tl.store(maxima + places + split, best, mask=is_lane)
        tl.store(masses + places + split, mass, mask=is_lane)
        here = sums + (places + split)[:, None] * LATENT + dims[None, :]
        tl.store(here, total.to(sums.dtype.element_ty), mask=is_dim)
        split += tl.num_programs(2)
        start, size = bounds_of_split(split, FIRST_SPLIT, LEVEL_SPLITS)


@triton.jit  # type: ignore[untyped-decorator]
def walk_latents(  # type: ignore[no-untyped-def]
    start, size, straight, turned, lane_rows, lengths, longest, count, cache, pages,
    own_lengths, tails, tail_stride, common, common_tiles, scale_log2,
    HAS_TAIL: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, TILE_KEYS: tl.constexpr,
    LATENT: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_LATENT: tl.constexpr, BLOCK_ROTARY: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Returns maxima, masses and sums of one split, tile by tile.

    First come the tiles that are common to all rows, then one tile of each row's own list in turn,
    then the next tile of each.
    """
    best = tl.full([LANES], float("-inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES, BLOCK_LATENT], tl.float32)
    dims, rotary = tl.arange(0, BLOCK_LATENT), tl.arange(0, BLOCK_ROTARY)
    end = tl.minimum(start + size, longest)
    num_steps = tl.cdiv(end - start, TILE_KEYS)
    num_common = num_steps
    if HAS_TAIL:
        num_common = tl.cdiv(tl.maximum(tl.minimum(end, common_tiles) - start, 0), TILE_KEYS)
        if ROWS > 1:
            num_steps = num_common + (num_steps - num_common) * count
    for step in range(num_steps):
        slots, row = tile_slots(
            step, num_steps, num_common, start, longest, count, pages, own_lengths, tails,
            tail_stride, common, HAS_TAIL, ROWS, TILE_KEYS, PAGE_SIZE,
        )  # fmt: skip
        is_key = (slots >= 0)[:, None]
        is_rotary = is_key
        keys = cache + slots.to(tl.int64)[:, None] * (LATENT + ROTARY)
        if LATENT < BLOCK_LATENT:
            is_key = is_key & (dims < LATENT)[None, :]
        if ROTARY < BLOCK_ROTARY:
            is_rotary = is_rotary & (rotary < ROTARY)[None, :]
        latents = tl.load(keys + dims[None, :], mask=is_key, other=0.0)
        rotated = tl.load(keys + LATENT + rotary[None, :], mask=is_rotary, other=0.0)
        scores = tl.dot(straight, tl.trans(latents), input_precision="ieee")
        more = tl.dot(turned, tl.trans(rotated), input_precision="ieee")
        # Scores in base 2. Each product is scaled by itself; else the compiler chains the products.
        scores = tl.fma(more, scale_log2, scores * scale_log2)
        tile = step
        is_row = lane_rows >= 0
        if HAS_TAIL and ROWS > 1:
            is_common = step < num_common
            tile = tl.where(is_common, step, num_common + (step - num_common) // count)
            is_row = is_common | (lane_rows == row)
        indices = start + tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
        is_seen = (indices[None, :] < lengths[:, None]) & is_row[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
        # `step < num_steps` holds in every step. If a product is followed by another one, Triton
        # 3.6 gives each warp its own rows; 64 lanes have rows for four warps only, and the other
        # four would repeat their work. Triton does not look for the second product after a branch.
        most = tl.ceil(tl.max(scores, 1))
        new_best = best
        if step < num_steps:
            new_best = tl.maximum(best, most)
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        if step < num_steps:
            exact = tl.exp2(scores - reference[:, None])
            weights = exact.to(latents.dtype)
        else:
            exact = scores
            weights = scores.to(latents.dtype)
        decay = power_of_two(best, new_best)
        mass = mass * decay + tl.sum(exact, 1)
        total *= decay[:, None]
        total = tl.dot(weights, latents, total, input_precision="ieee")
        best = new_best
    return best, mass, total


@triton.jit  # type: ignore[untyped-decorator]
def tile_slots(  # type: ignore[no-untyped-def]
    step, num_steps, num_common, start, longest, count, pages, own_lengths, tails, tail_stride,
    common, HAS_TAIL: tl.constexpr, ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the slots `[TILE_KEYS]` int32 of one step of a split, -1 where there is no key, and
    the row within the block that owns the tile, if the tile is not common to all rows."""
    tile = step
    row = 0
    length = longest
    if HAS_TAIL:
        if ROWS > 1:
            own = tl.maximum(step - num_common, 0)
            tile = tl.where(step < num_common, step, num_common + own // count)
            row = own % count
        length = tl.load(own_lengths + row)
        length = tl.where(step < num_common, longest, length)
    indices = start + tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
    is_key = (indices < length) & (step < num_steps)
    is_shared = is_key
    if HAS_TAIL:
        is_shared = is_key & (indices < common)
    page = tl.load(pages + indices // PAGE_SIZE, mask=is_shared, other=0)
    slots = page * PAGE_SIZE + indices % PAGE_SIZE
    if HAS_TAIL:
        is_own = is_key & (indices >= common)
        tail = tl.load(tails + row * tail_stride + indices - common, mask=is_own, other=0)
        slots = tl.where(is_shared, slots, tail.to(tl.int32))
    return tl.where(is_key, slots, -1), row


@triton.jit(do_not_specialize=["max_splits"])  # type: ignore[untyped-decorator]
def combine_latents(  # type: ignore[no-untyped-def]
    sums, maxima, masses, results, block_first_rows, block_counts, row_lengths, max_splits,
    ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_LATENT: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr, GROUP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds the parts of one row and head in the order of the splits, GROUP loads at a time."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    # Read before `begin`: kernels before `attend_latents`, which has waited for them, wrote these.
    count = tl.load(block_counts + place // ROWS)
    row = tl.load(block_first_rows + place // ROWS) + place % ROWS
    is_row = place % ROWS < count
    length = tl.load(row_lengths + row, mask=is_row, other=0)
    begin(IS_DEPENDENT)
    if not is_row:
        return
    dims = tl.arange(0, BLOCK_LATENT)
    is_dim = dims < LATENT
    best = tl.full([], float("-inf"), tl.float32)
    mass = tl.zeros([], tl.float32)
    total = tl.zeros([BLOCK_LATENT], tl.float32)
    slot = (place * NUM_HEADS + head).to(tl.int64) * max_splits
    first = 0
    start = 0
    while start < length:
        # The splits of a group have equal lengths, because GROUP divides LEVEL_SPLITS.
        start, size = bounds_of_split(first, FIRST_SPLIT, LEVEL_SPLITS)
        splits = tl.arange(0, GROUP)
        is_split = start + splits * size < length
        parts = tl.load(maxima + slot + splits, mask=is_split, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(parts, 0))
        keep = power_of_two(best, new_best)
        mass *= keep
        total *= keep
        # Unrolled, so that all loads are in flight together.
        for split in tl.static_range(GROUP):
            is_part = start + split * size < length
            part_best = tl.load(maxima + slot + split, mask=is_part, other=float("-inf"))
            part_mass = tl.load(masses + slot + split, mask=is_part, other=0.0)
            part_total = tl.load(
                sums + (slot + split) * LATENT + dims, mask=is_part & is_dim, other=0.0
            )
            weight = power_of_two(part_best, new_best)
            mass += part_mass * weight
            total += part_total.to(tl.float32) * weight
        best = new_best
        slot += GROUP
        first += GROUP
        start += GROUP * size
    attended = total / tl.where(mass == 0.0, 1.0, mass)
    tl.store(
        results + (row.to(tl.int64) * NUM_HEADS + head) * LATENT + dims,
        attended.to(results.dtype.element_ty), mask=is_dim,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def enter_latents(  # type: ignore[no-untyped-def]
    made, query_weight, latent_weight, cos, signed_sin, slots, queries, cache,
    row_stride, part_size, query_eps, latent_eps,
    NUM_PARTS: tl.constexpr, QUERIES: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_LATENT: tl.constexpr, BLOCK_ROTARY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes a row's normed latent vector and its rotated key to the row's slot; the second program
    of a row norms its compressed queries.

    Args:
        made: `[T, QUERIES + L + R]`, or the parts of it; rows are `row_stride` apart.
    """
    row = tl.program_id(0).to(tl.int64)
    first = row * row_stride
    dtype = cache.dtype.element_ty
    if tl.program_id(1) == 0:
        dims = tl.arange(0, BLOCK_LATENT)
        is_dim = dims < LATENT
        weights = tl.load(latent_weight + dims, mask=is_dim, other=0.0)
        begin(IS_DEPENDENT)
        slot = tl.load(slots + row) * (LATENT + ROTARY)
        latents = summed(made, first + QUERIES + dims, is_dim, part_size, dtype, NUM_PARTS)
        tl.store(cache + slot + dims, normed_row(latents, weights, LATENT, latent_eps), mask=is_dim)
        rotary = tl.arange(0, BLOCK_ROTARY)
        is_rotary = rotary < ROTARY
        partners = (rotary + ROTARY // 2) % ROTARY
        key = first + QUERIES + LATENT
        straight = summed(made, key + rotary, is_rotary, part_size, dtype, NUM_PARTS)
        crossed = summed(made, key + partners, is_rotary, part_size, dtype, NUM_PARTS)
        row_cos = tl.load(cos + row * ROTARY + rotary, mask=is_rotary, other=0.0)
        row_sin = tl.load(signed_sin + row * ROTARY + rotary, mask=is_rotary, other=0.0)
        rotated = straight.to(tl.float32) * row_cos + crossed.to(tl.float32) * row_sin
        tl.store(cache + slot + LATENT + rotary, rotated.to(dtype), mask=is_rotary)
    else:
        columns = tl.arange(0, BLOCK_QUERIES)
        is_column = columns < QUERIES
        query_weights = tl.load(query_weight + columns, mask=is_column, other=0.0)
        begin(IS_DEPENDENT)
        values = summed(made, first + columns, is_column, part_size, dtype, NUM_PARTS)
        normed = normed_row(values, query_weights, QUERIES, query_eps)
        tl.store(queries + row * QUERIES + columns, normed, mask=is_column)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def multiply_heads(  # type: ignore[no-untyped-def]
    inputs, matrices, results, cos, signed_sin, num_rows, row_stride,
    NUM_HEADS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr, ROTARY: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, TILE_CHANNELS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_DEPTH: tl.constexpr, BLOCK_ROTARY: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiplies the first K dimensions of each head with the head's own matrix, and rotates the
    last R.

    The matrix is the left operand and the depth is summed in steps of one size, so that an
    element's bits depend only on its own row, as in `batch_invariant_triton`.

    Args:
        inputs: `[T, H, K + R]`, rows `row_stride` apart.
        matrices: `[H, C, K]`, or `[H, K, C]` if IS_TRANSPOSED.
        results: `[T, H, C + R]`. R may be 0.
    """
    begin(IS_DEPENDENT)
    head, tile = tl.program_id(0), tl.program_id(1)
    rows = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = rows < num_rows
    row_inputs = inputs + rows.to(tl.int64) * row_stride + head * (DEPTH + ROTARY)
    row_results = results + (rows.to(tl.int64) * NUM_HEADS + head) * (CHANNELS + ROTARY)
    if tile * TILE_CHANNELS < CHANNELS:
        channels = tile * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
        steps = tl.arange(0, TILE_DEPTH)
        is_channel = channels < CHANNELS
        head_matrix = matrices + head.to(tl.int64) * (CHANNELS * DEPTH)
        total = tl.zeros([TILE_CHANNELS, TILE_ROWS], tl.float32)
        for start in range(0, DEPTH, TILE_DEPTH):
            depths = start + steps
            is_depth = depths < DEPTH
            here = tl.load(
                row_inputs[None, :] + depths[:, None],
                mask=is_depth[:, None] & is_row[None, :], other=0.0,
            )  # fmt: skip
            if IS_TRANSPOSED:
                weights = tl.trans(tl.load(
                    head_matrix + depths[:, None] * CHANNELS + channels[None, :],
                    mask=is_depth[:, None] & is_channel[None, :], other=0.0,
                ))  # fmt: skip
            else:
                weights = tl.load(
                    head_matrix + channels[:, None] * DEPTH + depths[None, :],
                    mask=is_channel[:, None] & is_depth[None, :], other=0.0,
                )  # fmt: skip
            total = tl.dot(weights, here, total, input_precision="ieee")
        tl.store(
            row_results[:, None] + channels[None, :], tl.trans(total).to(results.dtype.element_ty),
            mask=is_row[:, None] & is_channel[None, :],
        )  # fmt: skip
    else:
        rotary = tl.arange(0, BLOCK_ROTARY)
        partners = (rotary + ROTARY // 2) % ROTARY
        is_rotary = is_row[:, None] & (rotary < ROTARY)[None, :]
        turned = row_inputs[:, None] + DEPTH
        straight = tl.load(turned + rotary[None, :], mask=is_rotary, other=0.0).to(tl.float32)
        crossed = tl.load(turned + partners[None, :], mask=is_rotary, other=0.0).to(tl.float32)
        table = rows.to(tl.int64)[:, None] * ROTARY + rotary[None, :]
        row_cos = tl.load(cos + table, mask=is_rotary, other=0.0)
        row_sin = tl.load(signed_sin + table, mask=is_rotary, other=0.0)
        rotated = (straight * row_cos + crossed * row_sin).to(results.dtype.element_ty)
        tl.store(row_results[:, None] + CHANNELS + rotary[None, :], rotated, mask=is_rotary)
