"""Triton kernels that lay out a round's rows: `open_batch`, and `tree_rows` with `tree_batch`."""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.dependent_jit import begin
from shared.speculation.topk_jit import num_before


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
    # The root, by every thread alike.
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
    """Lays out one sequence's open rows; those it lacks compute token 0 in the padding page."""
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
    """Takes the first prepared tree that fits how the last round left one slot."""
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
    # The root, by every thread alike.
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
    """Reads a tree that another process wrote, and lays out those nodes of it that are any."""
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
