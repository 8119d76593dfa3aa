"""Triton kernels of a round: growth of trees, two launches for each level; layout of their rows;
commit of the accepted path."""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.dependent_jit import begin
from shared.kernels.fused_jit import summed
from shared.speculation.draw_triton import (
    NO_KEY,
    best_in_lists,
    best_of,
    gumbel_at,
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

    Each sequence has ROWS rows; its temperature, seed and length determine the noise of a row.
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
    """Finds the WIDTH best tokens of one row, best first, among the best of its blocks.

    Args:
        row_keys: `[S * ROWS, WIDTH]`, written as input of `grow_level`.
        tokens: `[S, num_rows, WIDTH]` int32, of all levels; this level begins at `first_row`.
        scores: `[S, num_rows, WIDTH]` float32, likewise.
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

    Each row has `num_lists` lists of `list_size` keys, best first, which hold its TOPK best.

    `beam_*` hold one level after another, each with TOPK entries for each sequence. `beam_visible`
    has a row of `NUM_LEVELS * TOPK` for each entry.
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
    # The best children of each row, among the best of its blocks.
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
        # Other threads of this program read what it stored so far.
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


# Layout of a round's rows, as in `RoundBatches.of_open_rows`, `tree_rows` and `of_trees`.


@triton.jit  # type: ignore[untyped-decorator]
def lay_tree(  # type: ignore[no-untyped-def]
    parents, depths, visible, positions, slots, kv_lengths, prefix_lengths,
    pages, sequence, length,
    NUM_ROWS: tl.constexpr, MAX_DEPTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Lays out the rows of one tree whose parents are stored, behind `length - 1` tokens."""
    own = sequence * NUM_ROWS
    tl.debug_barrier()
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < NUM_ROWS
    seen = (rows[:, None] == rows[None, :]) | (rows[None, :] == 0)
    ancestors = tl.load(parents + own + rows, mask=is_row, other=0)
    for _ in range(MAX_DEPTH - 1):
        seen = seen | (rows[None, :] == ancestors[:, None])
        ancestors = tl.load(parents + own + ancestors)
    depth = tl.sum((seen & is_row[None, :]).to(tl.int64), 1) - 1
    is_square = is_row[:, None] & is_row[None, :]
    tl.store(visible + (own + rows)[:, None] * NUM_ROWS + rows[None, :], seen, mask=is_square)
    tl.store(depths + own + rows, depth, mask=is_row)
    index = length - 1 + rows
    page = tl.load(pages + index // PAGE_SIZE, mask=is_row, other=0)
    tl.store(positions + own + rows, length - 1 + depth, mask=is_row)
    tl.store(slots + own + rows, page.to(tl.int64) * PAGE_SIZE + index % PAGE_SIZE, mask=is_row)
    tl.store(kv_lengths + sequence, (length - 1 + NUM_ROWS).to(tl.int32))
    tl.store(prefix_lengths + sequence, (length - 1).to(tl.int32))


@triton.jit(do_not_specialize=["number_stride", "page_stride"])  # type: ignore[untyped-decorator]
def finish_trees(  # type: ignore[no-untyped-def]
    candidate_tokens, candidate_parents, candidate_paths, candidate_rows,
    token_ids, parents, depths, row_paths, visible,
    batch_tokens, positions, slots, kv_lengths, prefix_lengths,
    numbers, page_table, number_stride, page_stride,
    NUM_CANDIDATES: tl.constexpr, NUM_ROWS: tl.constexpr, MAX_DEPTH: tl.constexpr,
    LENGTH: tl.constexpr, OPEN: tl.constexpr, TAIL: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_CANDIDATES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Keeps the best `NUM_ROWS - 1` candidates of one tree and lays out the target's rows."""
    begin(IS_DEPENDENT)
    sequence = tl.program_id(0)
    candidates = tl.arange(0, BLOCK_CANDIDATES)
    is_candidate = candidates < NUM_CANDIDATES
    first = sequence * NUM_CANDIDATES
    path = tl.load(candidate_paths + first + candidates, mask=is_candidate, other=float("-inf"))
    num_better = num_before(candidate_paths + first, NUM_CANDIDATES, BLOCK_CANDIDATES, CHUNK)
    is_kept = is_candidate & (num_better < NUM_ROWS - 1)
    row = tl.cumsum(is_kept.to(tl.int32), 0)
    tl.store(candidate_rows + first + candidates, row, mask=is_kept)
    tl.debug_barrier()
    is_node = is_kept & (path > float("-inf"))
    token = tl.load(candidate_tokens + first + candidates, mask=is_kept, other=0)
    above = tl.load(candidate_parents + first + candidates, mask=is_node, other=0)
    parent = tl.load(candidate_rows + first + above - 1, mask=is_node & (above > 0), other=0)
    own = sequence * NUM_ROWS
    tl.store(token_ids + own + row, tl.where(is_node, token, -1).to(tl.int64), mask=is_kept)
    tl.store(batch_tokens + own + row, tl.where(is_node, token, 0).to(tl.int64), mask=is_kept)
    tl.store(parents + own + row, parent.to(tl.int64), mask=is_kept)
    tl.store(row_paths + own + row, path, mask=is_kept)
    # All threads store the same root.
    state = numbers + sequence * number_stride
    length = tl.load(state + LENGTH)
    root = tl.load(state + TAIL + tl.load(state + OPEN) - 1)
    tl.store(token_ids + own, root)
    tl.store(batch_tokens + own, root)
    tl.store(parents + own, root * 0)
    tl.store(row_paths + own, 0.0)
    lay_tree(
        parents, depths, visible, positions, slots, kv_lengths, prefix_lengths,
        page_table + sequence * page_stride, sequence, length,
        NUM_ROWS, MAX_DEPTH, PAGE_SIZE, BLOCK_ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["number_stride", "page_stride", "feature_page_stride"])  # type: ignore[untyped-decorator]
def lay_open_rows(  # type: ignore[no-untyped-def]
    numbers, page_table, feature_page_table,
    token_ids, positions, slots, feature_slots, kv_lengths, prefix_lengths, last_rows,
    number_stride, page_stride, feature_page_stride,
    NUM_ROWS: tl.constexpr, LENGTH: tl.constexpr, OPEN: tl.constexpr, TAIL: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Lays out one sequence's open rows; further rows compute token 0 in the padding page."""
    begin(IS_DEPENDENT)
    sequence = tl.program_id(0)
    state = numbers + sequence * number_stride
    num_open = tl.load(state + OPEN)
    start = tl.load(state + LENGTH) - 1 - num_open
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < NUM_ROWS
    is_open = rows < num_open
    index = start + rows
    own = sequence * NUM_ROWS + rows
    page = tl.load(page_table + sequence * page_stride + index // PAGE_SIZE, mask=is_open, other=0)
    slot = tl.where(is_open, page.to(tl.int64) * PAGE_SIZE + index % PAGE_SIZE, 0)
    page = tl.load(
        feature_page_table + sequence * feature_page_stride + index // PAGE_SIZE,
        mask=is_open, other=0,
    )  # fmt: skip
    feature = tl.where(is_open, page.to(tl.int64) * PAGE_SIZE + index % PAGE_SIZE, 0)
    token = tl.load(state + TAIL + rows, mask=is_row & is_open, other=0)
    tl.store(token_ids + own, token, mask=is_row)
    tl.store(positions + own, index, mask=is_row)
    tl.store(slots + own, slot, mask=is_row)
    tl.store(feature_slots + own, feature, mask=is_row)
    tl.store(kv_lengths + sequence, (start + NUM_ROWS).to(tl.int32))
    tl.store(prefix_lengths + sequence, start.to(tl.int32))
    tl.store(last_rows + sequence, sequence * NUM_ROWS + num_open - 1)


@triton.jit(do_not_specialize=["number_stride", "page_stride"])  # type: ignore[untyped-decorator]
def select_trees(  # type: ignore[no-untyped-def]
    prepared_slots, prepared_trees,
    token_ids, parents, depths, visible,
    batch_tokens, positions, slots, kv_lengths, prefix_lengths,
    numbers, page_table, number_stride, page_stride,
    FIRST: tl.constexpr, COUNT: tl.constexpr,
    FENCE: tl.constexpr, WANTED_ROW: tl.constexpr, WANTED_BONUS: tl.constexpr,
    TREE: tl.constexpr, NUM_COLUMNS: tl.constexpr, ANY: tl.constexpr, NO_TOKEN: tl.constexpr,
    LENGTH: tl.constexpr, OPEN: tl.constexpr, ACTIVE: tl.constexpr, ENDED: tl.constexpr,
    TAIL: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr, MAX_DEPTH: tl.constexpr,
    BLOCK_TREES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Takes the first prepared tree that fits the outcome of the last round of one slot."""
    sequence = tl.program_id(0)
    state = numbers + sequence * number_stride
    length = tl.load(state + LENGTH)
    root = tl.load(state + TAIL + tl.load(state + OPEN) - 1)
    ended = tl.load(state + ENDED)
    first = tl.load(prepared_slots + sequence * 2 + FIRST)
    count = tl.load(prepared_slots + sequence * 2 + COUNT)
    places = tl.arange(0, BLOCK_TREES)
    is_own = places < count
    heads = prepared_trees + (first + places) * NUM_COLUMNS
    fence = tl.load(heads + FENCE, mask=is_own, other=0)
    row = tl.load(heads + WANTED_ROW, mask=is_own, other=0)
    bonus = tl.load(heads + WANTED_BONUS, mask=is_own, other=0)
    fits = is_own & (fence == length)
    fits = fits & ((row == ANY) | (row == ended)) & ((bonus == ANY) | (bonus == root))
    chosen = tl.min(tl.where(fits, places, BLOCK_TREES), 0)
    is_found = chosen < BLOCK_TREES
    tree = prepared_trees + (first + tl.where(is_found, chosen, 0)) * NUM_COLUMNS + TREE
    nodes = tl.arange(0, BLOCK_ROWS)
    is_node = nodes < NUM_ROWS - 1
    token = tl.load(tree + nodes, mask=is_node & is_found, other=NO_TOKEN)
    parent = tl.load(tree + NUM_ROWS - 1 + nodes, mask=is_node & is_found, other=0)
    own = sequence * NUM_ROWS
    rows = own + 1 + nodes
    tl.store(token_ids + rows, token.to(tl.int64), mask=is_node)
    tl.store(batch_tokens + rows, tl.maximum(token, 0).to(tl.int64), mask=is_node)
    tl.store(parents + rows, parent.to(tl.int64), mask=is_node)
    # All threads store the same root.
    tl.store(token_ids + own, root)
    tl.store(batch_tokens + own, root)
    tl.store(parents + own, root * 0)
    tl.store(state + ACTIVE, is_found.to(tl.int64))
    lay_tree(
        parents, depths, visible, positions, slots, kv_lengths, prefix_lengths,
        page_table + sequence * page_stride, sequence, length,
        NUM_ROWS, MAX_DEPTH, PAGE_SIZE, BLOCK_ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["vocab_size", "number_stride", "page_stride"])  # type: ignore[untyped-decorator]
def mend_trees(  # type: ignore[no-untyped-def]
    written, vocab_size,
    token_ids, parents, depths, visible,
    batch_tokens, positions, slots, kv_lengths, prefix_lengths,
    numbers, page_table, number_stride, page_stride,
    LENGTH: tl.constexpr, OPEN: tl.constexpr, TAIL: tl.constexpr, NO_TOKEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr, MAX_DEPTH: tl.constexpr, IS_CHAIN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Reads a tree that another process wrote, and lays out its valid nodes; see `mended_rows`."""
    sequence = tl.program_id(0)
    state = numbers + sequence * number_stride
    length = tl.load(state + LENGTH)
    root = tl.load(state + TAIL + tl.load(state + OPEN) - 1)
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < NUM_ROWS
    tree = written + sequence * 2 * NUM_ROWS
    token = tl.load(tree + rows, mask=is_row & (rows > 0), other=NO_TOKEN)
    parent = tl.load(tree + NUM_ROWS + rows, mask=is_row & (rows > 0), other=0)
    before = tl.maximum(rows - 1, 0).to(tl.int64)
    parent = tl.maximum(tl.minimum(parent, before), 0)
    if IS_CHAIN:
        parent = tl.where(is_row, before, 0)
    own = sequence * NUM_ROWS
    tl.store(parents + own + rows, parent, mask=is_row)
    tl.debug_barrier()
    ancestors = parent
    for _ in range(MAX_DEPTH - 1):
        ancestors = tl.load(parents + own + ancestors)
    is_node = (token >= 0) & (token < vocab_size) & (ancestors == 0) & is_row & (rows > 0)
    is_same = (token[:, None] == token[None, :]) & (parent[:, None] == parent[None, :])
    is_same = is_same & is_node[None, :] & (rows[None, :] < rows[:, None])
    is_node = is_node & (tl.max(is_same.to(tl.int32), 1) == 0)
    token = tl.where(rows == 0, root, tl.where(is_node, token, NO_TOKEN))
    tl.store(token_ids + own + rows, token, mask=is_row)
    tl.store(batch_tokens + own + rows, tl.maximum(token, 0), mask=is_row)
    lay_tree(
        parents, depths, visible, positions, slots, kv_lengths, prefix_lengths,
        page_table + sequence * page_stride, sequence, length,
        NUM_ROWS, MAX_DEPTH, PAGE_SIZE, BLOCK_ROWS,
    )  # fmt: skip


# The end of a round: the accepted path, its keys, values and features.


@triton.jit(do_not_specialize=["number_stride"])  # type: ignore[untyped-decorator]
def accept_trees(  # type: ignore[no-untyped-def]
    drawn, token_ids, parents, visible, slots, numbers,
    result, source_rows, source_slots, target_slots, number_stride,
    NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, RESULT_COUNTS: tl.constexpr,
    LENGTH: tl.constexpr, OPEN: tl.constexpr, ACTIVE: tl.constexpr, ENDED: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Accepts the path of one tree, see `accept_rows`, and commits it to the state."""
    begin(IS_DEPENDENT)
    sequence = tl.program_id(0)
    own = sequence * NUM_ROWS
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < NUM_ROWS
    token = tl.load(token_ids + own + rows, mask=is_row, other=-1)
    parent = tl.load(parents + own + rows, mask=is_row, other=0)
    wanted = tl.load(drawn + own + parent, mask=is_row, other=0)
    own_drawn = tl.load(drawn + own + rows, mask=is_row, other=0)
    matches = ((token == wanted) & (own_drawn >= 0) | (rows == 0)).to(tl.int32)
    is_square = is_row[:, None] & is_row[None, :]
    seen = tl.load(
        visible + (own + rows)[:, None] * NUM_ROWS + rows[None, :], mask=is_square, other=0
    ).to(tl.int32)
    is_accepted = (tl.min(tl.maximum(1 - seen, matches[None, :]), 1) == 1) & is_row
    place = tl.cumsum(is_accepted.to(tl.int32), 0) - 1
    count = tl.sum(is_accepted.to(tl.int32), 0)
    num_nodes = tl.sum((is_row & (rows > 0) & (token >= 0)).to(tl.int64), 0)
    # The path, then the rows that stay where they are.
    steps = tl.arange(0, BLOCK_WIDTH)
    is_step = steps < WIDTH
    out = sequence * WIDTH
    tl.store(source_rows + out + place, (own + rows).to(tl.int64), mask=is_accepted)
    tl.store(
        source_slots + out + place,
        tl.load(slots + own + rows, mask=is_row, other=0), mask=is_accepted,
    )  # fmt: skip
    slot = tl.load(slots + own + steps, mask=is_step, other=0)
    is_beyond = is_step & (steps >= count)
    tl.store(target_slots + out + steps, slot, mask=is_step)
    tl.store(source_slots + out + steps, slot, mask=is_beyond)
    tl.store(source_rows + out + steps, (own + steps).to(tl.int64), mask=is_beyond)
    # The result for the host, and the state that the next round starts from.
    state = numbers + sequence * number_stride
    is_active = tl.load(state + ACTIVE)
    answer = result + sequence * (RESULT_COUNTS + WIDTH)
    tl.store(answer + RESULT_COUNTS + place, own_drawn, mask=is_accepted)
    tl.store(answer + RESULT_COUNTS + steps, slot * 0, mask=is_beyond)
    tl.store(answer, count * is_active)
    tl.store(answer + 1, num_nodes)
    if is_active == 1:
        tl.store(state + TAIL + place, own_drawn, mask=is_accepted)
        tl.store(state + LENGTH, tl.load(state + LENGTH) + count)
        tl.store(state + OPEN, count.to(tl.int64))
        last_row = tl.max(tl.where(is_accepted, rows, 0), 0)
        tl.store(state + ENDED, last_row.to(tl.int64))


@triton.jit(do_not_specialize=["layer_stride"])  # type: ignore[untyped-decorator]
def move_path(  # type: ignore[no-untyped-def]
    storage, source_slots, target_slots, layer_stride,
    WIDTH: tl.constexpr, TOKEN_SIZE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Moves the tokens of one path within one layer's keys or values."""
    begin(IS_DEPENDENT)
    sequence = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    steps = tl.arange(0, BLOCK_WIDTH)
    is_step = steps < WIDTH
    sources = tl.load(source_slots + sequence * WIDTH + steps, mask=is_step, other=0)
    targets = tl.load(target_slots + sequence * WIDTH + steps, mask=is_step, other=0)
    is_moved = is_step & (sources != targets)
    if tl.sum(is_moved.to(tl.int32), 0) == 0:
        return
    elements = tl.program_id(2) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_element = is_moved[:, None] & (elements < TOKEN_SIZE)[None, :]
    base = storage + layer * layer_stride
    values = tl.load(
        base + sources[:, None] * TOKEN_SIZE + elements[None, :], mask=is_element, other=0.0
    )
    # The target slot of one token may be the source of another: read all before any is written.
    tl.debug_barrier()
    tl.store(base + targets[:, None] * TOKEN_SIZE + elements[None, :], values, mask=is_element)


@triton.jit(do_not_specialize=["first_part"])  # type: ignore[untyped-decorator]
def gather_parts(  # type: ignore[no-untyped-def]
    first, second, third, fourth, rows, joined, first_part,
    NUM_PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copies one row of one of four feature tensors to its place in the joined rows."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source = first
    if part == 1:
        source = second
    if part == 2:
        source = third
    if part == 3:
        source = fourth
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    origin = tl.load(rows + row)
    values = tl.load(source + origin * SIZE + columns, mask=is_column, other=0.0)
    target = joined + (row * NUM_PARTS + first_part + part) * SIZE
    tl.store(target + columns, values, mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(  # type: ignore[no-untyped-def]
    rows, like, slots, stored,
    NUM_PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rounds some columns of one row to the dtype of `like`, and writes them to the row's slot."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    dtype = like.dtype.element_ty
    values = summed(
        rows, row * SIZE + columns, is_column, tl.num_programs(0) * SIZE, dtype, NUM_PARTS
    )
    target = stored + tl.load(slots + row) * SIZE + columns
    tl.store(target, values.to(stored.dtype.element_ty), mask=is_column)
