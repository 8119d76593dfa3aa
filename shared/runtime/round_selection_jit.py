"""The Triton kernel that selects a round's trees and lays out their rows."""

from __future__ import annotations

import triton
import triton.language as tl

from shared.runtime.round_layout_jit import lay_tree


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
