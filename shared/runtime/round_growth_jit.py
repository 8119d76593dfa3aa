"""Triton kernels of a level of tree growth: `confidence` and `growth` in two launches."""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.dependent_jit import begin
from shared.speculation.noise_jit import gumbel_at
from shared.speculation.topk_jit import (
    NO_KEY,
    best_in_lists,
    best_of,
    index_of,
    keys_of,
    num_before,
    value_of,
)


@triton.jit(do_not_specialize=["depth", "number_stride"])  # type: ignore[untyped-decorator]
def score_blocks(  # type: ignore[no-untyped-def]
    logits, token_map, numbers, sampling, block_keys, block_maxima, block_sums,
    depth, number_stride, num_own_tokens, num_blocks,
    ROWS: tl.constexpr, TOPK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_DRAWS: tl.constexpr,
    LENGTH: tl.constexpr, SEED: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes the TOPK best tokens of one block of one row, best first, and the block's part of the
    softmax.

    Rows are ROWS a sequence, whose temperature, seed and length say which noise is added.
    """
    begin(IS_DEPENDENT)
    row = tl.program_id(0)
    block = tl.program_id(1)
    own = block * BLOCK + tl.arange(0, BLOCK)
    is_token = own < num_own_tokens
    values = tl.load(
        logits + row.to(tl.int64) * num_own_tokens + own, mask=is_token, other=float("-inf")
    ).to(tl.float32)
    tokens = own.to(tl.int64)
    if HAS_MAP:
        tokens = tl.load(token_map + own, mask=is_token, other=0)
    if HAS_DRAWS:
        sequence = row // ROWS
        temperature = tl.load(sampling + sequence * 4).to(tl.float32)
        if temperature > 0.0:
            state = numbers + sequence * number_stride
            position = tl.load(state + LENGTH) + tl.load(state + OFFSET) + depth
            seed = tl.load(state + SEED)
            values += temperature * gumbel_at(tokens, position, seed)
    values = tl.where(is_token, values, float("-inf"))
    highest = tl.max(values, 0)
    place = row * num_blocks + block
    tl.store(block_maxima + place, highest)
    tl.store(block_sums + place, tl.sum(tl.exp(values - highest), 0))
    keys = tl.where(is_token, keys_of(values, tokens), NO_KEY)
    for rank in tl.static_range(TOPK):
        best = best_of(keys, 0)
        tl.store(block_keys + place * TOPK + rank + tl.arange(0, 1), best)
        keys = tl.where(keys == best, NO_KEY, keys)


@triton.jit(do_not_specialize=["first_row"])  # type: ignore[untyped-decorator]
def choose_tokens(  # type: ignore[no-untyped-def]
    block_keys, block_maxima, block_sums, row_keys, tokens, scores, num_blocks, first_row, num_rows,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Finds the WIDTH best tokens of one row, from those of its blocks, best first.

    Args:
        row_keys: `[S * ROWS, WIDTH]`, what `grow_level` goes on from.
        tokens: `[S, num_rows, WIDTH]` int32, of all levels; this one begins at `first_row`.
        scores: likewise, float32.
    """
    begin(IS_DEPENDENT)
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    is_block = blocks < num_blocks
    parts = tl.load(block_maxima + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    sums = tl.load(block_sums + row * num_blocks + blocks, mask=is_block, other=0.0)
    highest = tl.max(parts, 0)
    log_total = tl.log(tl.sum(sums * tl.exp(parts - highest), 0)) + highest
    keys = best_in_lists(
        block_keys + row * num_blocks * WIDTH, 1, num_blocks, WIDTH, WIDTH, 1, LANES
    )
    keys = keys.reshape(LANES)
    ranks = tl.arange(0, LANES)
    is_stored = ranks < WIDTH
    tl.store(row_keys + row * WIDTH + ranks, keys, mask=is_stored)
    place = ((row // ROWS) * num_rows + first_row + row % ROWS) * WIDTH + ranks
    is_token = keys != NO_KEY
    tl.store(tokens + place, tl.where(is_token, index_of(keys), 0).to(tl.int32), mask=is_stored)
    score = tl.minimum(value_of(keys) - log_total, 0.0)
    tl.store(scores + place, tl.where(is_token, score, float("-inf")), mask=is_stored)


@triton.jit(do_not_specialize=["level", "first_candidate", "num_candidates", "number_stride"])  # type: ignore[untyped-decorator]
def grow_level(  # type: ignore[no-untyped-def]
    row_keys, num_lists, list_size, block_maxima, block_sums, num_blocks,
    candidate_tokens, candidate_parents, candidate_paths,
    beam_selected, beam_paths, beam_visible, parent_rows,
    token_ids, positions, slots, kv_lengths, prefix_lengths,
    numbers, page_table, level, first_candidate, num_candidates, number_stride, page_stride,
    ROWS: tl.constexpr, TOPK: tl.constexpr, NUM_LEVELS: tl.constexpr, IS_LAST: tl.constexpr,
    LENGTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOPK: tl.constexpr, LANES: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_CHILDREN: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_VISIBLE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds one level of one tree, selects its beam and lays out the beam's rows.

    Each row has `num_lists` lists of `list_size` keys, best first, among them its TOPK best.

    Levels lie behind one another in `beam_*`, each with TOPK entries a sequence; `beam_visible`
    has one row of `NUM_LEVELS * TOPK` for each.
    """
    begin(IS_DEPENDENT)
    sequence = tl.program_id(0)
    num_sequences = tl.num_programs(0)
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < ROWS
    # The softmax of each row, from its blocks.
    blocks = tl.arange(0, BLOCKS)
    is_block = is_row[:, None] & (blocks < num_blocks)[None, :]
    places = (sequence * ROWS + rows)[:, None] * num_blocks + blocks[None, :]
    parts = tl.load(block_maxima + places, mask=is_block, other=float("-inf"))
    highest = tl.max(parts, 1)
    highest = tl.where(is_row, highest, 0.0)
    sums = tl.load(block_sums + places, mask=is_block, other=0.0)
    total = tl.sum(sums * tl.exp(parts - highest[:, None]), 1)
    log_total = tl.log(tl.where(is_row, total, 1.0)) + highest
    # The best children of each row, from those of its blocks.
    own_keys = row_keys + sequence * ROWS * num_lists * list_size
    children = best_in_lists(own_keys, ROWS, num_lists, list_size, TOPK, BLOCK_ROWS, LANES)
    lanes = tl.arange(0, LANES)
    is_stored = is_row[:, None] & (lanes < TOPK)[None, :]
    base = tl.zeros([BLOCK_ROWS], tl.float32)
    before = ((level - 1) * num_sequences + sequence) * TOPK
    parents = tl.zeros([BLOCK_ROWS], tl.int32)
    if level > 0:
        base = tl.load(beam_paths + before + rows, mask=is_row, other=0.0)
        parents = tl.load(beam_selected + before + rows, mask=is_row, other=0) + 1
    own = tl.minimum(value_of(children) - log_total[:, None], 0.0)
    path = tl.where(children != NO_KEY, own + base[:, None], float("-inf"))
    first = sequence * num_candidates + first_candidate
    places = first + rows[:, None] * TOPK + lanes[None, :]
    tl.store(candidate_tokens + places, index_of(children).to(tl.int32), mask=is_stored)
    tl.store(candidate_parents + places, parents[:, None] + lanes[None, :] * 0, mask=is_stored)
    tl.store(candidate_paths + places, path, mask=is_stored)
    if not IS_LAST:
        # What this program stored so far, other threads of it read.
        tl.debug_barrier()
        own_children = tl.arange(0, BLOCK_CHILDREN)
        places = num_before(candidate_paths + first, ROWS * TOPK, BLOCK_CHILDREN, CHUNK)
        ranks = tl.arange(0, BLOCK_TOPK)
        is_rank = ranks < TOPK
        is_own = (places[None, :] == ranks[:, None]) & (own_children < ROWS * TOPK)[None, :]
        child = tl.sum(tl.where(is_own & is_rank[:, None], own_children[None, :], 0), 1)
        parent = child // TOPK
        token = tl.load(candidate_tokens + first + child, mask=is_rank, other=0)
        path = tl.load(candidate_paths + first + child, mask=is_rank, other=0.0)
        row = (level * num_sequences + sequence) * TOPK + ranks
        tl.store(beam_selected + row, first_candidate + child, mask=is_rank)
        tl.store(beam_paths + row, path, mask=is_rank)
        tl.store(parent_rows + row, (sequence * ROWS + parent).to(tl.int64), mask=is_rank)
        columns = tl.arange(0, BLOCK_VISIBLE)
        width: tl.constexpr = NUM_LEVELS * TOPK
        is_inherited = is_rank[:, None] & (columns < level * TOPK)[None, :]
        inherited = tl.load(
            beam_visible + (before + parent)[:, None] * width + columns[None, :],
            mask=is_inherited, other=0,
        )  # fmt: skip
        is_own = columns[None, :] == (level * TOPK + ranks)[:, None]
        tl.store(
            beam_visible + row[:, None] * width + columns[None, :],
            tl.where(is_own, 1, inherited.to(tl.int32)).to(tl.int1),
            mask=is_rank[:, None] & (columns < width)[None, :],
        )  # fmt: skip
        length = tl.load(numbers + sequence * number_stride + LENGTH)
        index = length - 1 + level * TOPK + ranks
        page = tl.load(
            page_table + sequence * page_stride + index // PAGE_SIZE, mask=is_rank, other=0
        )
        tl.store(token_ids + row, token.to(tl.int64), mask=is_rank)
        tl.store(positions + row, length - 1 + level + ranks * 0, mask=is_rank)
        tl.store(slots + row, page.to(tl.int64) * PAGE_SIZE + index % PAGE_SIZE, mask=is_rank)
        tl.store(
            kv_lengths + level * num_sequences + sequence,
            (length - 1 + (level + 1) * TOPK).to(tl.int32),
        )
        tl.store(prefix_lengths + sequence, (length - 1).to(tl.int32))
