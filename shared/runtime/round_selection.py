"""First part of a round whose trees came from elsewhere: the one that was prepared for the end of
the round before.

It stands where `RoundDraft` does in rounds with a head. A slot that nothing fits sits the round
out: its rows are computed for nobody, and nothing is committed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.runtime.prepared_trees import (
    ANY,
    BONUS,
    COUNT,
    ENDED,
    FIRST,
    LENGTH,
    MAX_PREPARED,
    TREE,
    PreparedBlock,
)
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState
from shared.speculation.tree_rows import NO_TOKEN, rows_of_parents


@dataclass(frozen=True, slots=True, eq=False)
class RoundSelection:
    """Selects for all slots of a state, in plain torch.

    Attributes:
        block: uploaded for trees of as many rows as `batches` lays out.
    """

    block: PreparedBlock
    batches: RoundBatches

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """Returns the tree that fits each slot, and notes in the state who takes part."""
        shape = self.batches.shape
        chosen, is_found = self._match(state)
        state.is_active.copy_(is_found)
        num_nodes = shape.num_tree_rows - 1
        tokens = torch.where(is_found.unsqueeze(1), chosen[:, TREE : TREE + num_nodes], NO_TOKEN)
        parents = torch.where(is_found.unsqueeze(1), chosen[:, TREE + num_nodes :], 0)
        roots = state.roots.unsqueeze(1)
        rows = rows_of_parents(
            torch.cat((roots, tokens), dim=1),
            torch.cat((torch.zeros_like(roots), parents), dim=1),
            shape.tree.num_steps,
        )
        return self.batches.of_trees(state, rows)

    def _match(self, state: RoundState) -> tuple[Tensor, Tensor]:
        """Returns the first tree that fits each slot, `[S, C]` int64, and whether one does."""
        slots = self.block.slots[: state.num_slots]
        trees = self.block.trees(self.batches.shape.num_tree_rows)
        steps = torch.arange(MAX_PREPARED, device=slots.device)
        is_own = steps < slots[:, COUNT].unsqueeze(1)
        places = torch.where(is_own, slots[:, FIRST].unsqueeze(1) + steps, 0)
        heads = trees[:, :TREE][places]
        fits = is_own & (heads[..., LENGTH] == state.lengths.unsqueeze(1))
        for column, value in ((ENDED, state.ended_rows), (BONUS, state.roots)):
            wanted = heads[..., column]
            fits &= (wanted == ANY) | (wanted == value.unsqueeze(1))
        first = fits.int().argmax(dim=1, keepdim=True)
        return trees[places.gather(1, first).squeeze(1)], fits.any(dim=1)
