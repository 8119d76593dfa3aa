"""Reads trees out of shared memory on CUDA, in one launch; see `given_trees`."""

from __future__ import annotations

import triton
from torch import Tensor

from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_growth import UnwrittenTrees
from shared.runtime.round_layout_jit import mend_trees
from shared.runtime.round_state import LENGTH, OPEN, TAIL, RoundState
from shared.speculation.tree import NO_TOKEN


def read_trees_fused(
    trees: Tensor, state: RoundState, batches: RoundBatches, vocab_size: int
) -> RoundTree:
    """Returns the trees of the slots of a state.

    Args:
        trees: `[at least S, 2, T]` int64, tokens and parents.
    """
    num_slots, num_rows = state.num_slots, batches.shape.num_tree_rows
    tree = UnwrittenTrees.of(num_slots, num_rows, state.numbers.device)
    mend_trees[(num_slots,)](
        trees, vocab_size,
        tree.token_ids, tree.parents, tree.depths, tree.visible,
        tree.batch_tokens, tree.positions, tree.slots, tree.kv_lengths, tree.prefix_lengths,
        state.numbers, state.page_table, state.numbers.stride(0), state.page_table.stride(0),
        LENGTH=LENGTH, OPEN=OPEN, TAIL=TAIL, NO_TOKEN=NO_TOKEN, PAGE_SIZE=batches.page_size,
        NUM_ROWS=num_rows, MAX_DEPTH=batches.shape.tree.num_steps,
        IS_CHAIN=batches.shape.tree.topk == 1,
        BLOCK_ROWS=triton.next_power_of_2(num_rows), num_warps=4,
    )  # fmt: skip
    return tree.written(state, batches)
