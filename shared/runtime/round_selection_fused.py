"""`RoundSelection` on CUDA: one launch."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from shared.runtime import round_selection as prepared
from shared.runtime.round_batches import RoundTree
from shared.runtime.round_growth import UnwrittenTrees
from shared.runtime.round_layout_jit import select_trees
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_selection import RoundSelection
from shared.runtime.round_state import ACTIVE, ENDED, LENGTH, OPEN, TAIL, RoundState
from shared.speculation.tree import NO_TOKEN


@dataclass(frozen=True, slots=True, eq=False)
class FusedRoundSelection(RoundSelection):
    """A slot is a program."""

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """See `RoundSelection.grow`."""
        num_slots, num_rows = state.num_slots, self.batches.shape.num_tree_rows
        tree = UnwrittenTrees.of(num_slots, num_rows, state.numbers.device)
        trees = self.block.trees(num_rows)
        select_trees[(num_slots,)](
            self.block.slots, trees,
            tree.token_ids, tree.parents, tree.depths, tree.visible,
            tree.batch_tokens, tree.positions, tree.slots, tree.kv_lengths, tree.prefix_lengths,
            state.numbers, state.page_table, state.numbers.stride(0), state.page_table.stride(0),
            FIRST=prepared.FIRST, COUNT=prepared.COUNT,
            FENCE=prepared.LENGTH, WANTED_ROW=prepared.ENDED, WANTED_BONUS=prepared.BONUS,
            TREE=prepared.TREE, NUM_COLUMNS=trees.shape[1], ANY=prepared.ANY, NO_TOKEN=NO_TOKEN,
            LENGTH=LENGTH, OPEN=OPEN, ACTIVE=ACTIVE, ENDED=ENDED, TAIL=TAIL,
            PAGE_SIZE=self.batches.page_size,
            NUM_ROWS=num_rows, MAX_DEPTH=self.batches.shape.tree.num_steps,
            BLOCK_TREES=triton.next_power_of_2(prepared.MAX_PREPARED),
            BLOCK_ROWS=triton.next_power_of_2(num_rows), num_warps=4,
        )  # fmt: skip
        return tree.written(state, self.batches)
