"""First part of a speculative round: the head takes in what was committed and grows the trees."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState
from shared.speculation.growth import Children, TreeGrowth, choose_children, parent_states
from shared.speculation.tree_rows import tree_rows


@dataclass(frozen=True, slots=True, eq=False)
class RoundDraft:
    """Drafts for all slots of a state, in plain torch.

    Attributes:
        pool: the head's; its pages are as large as the target's.
        feature_rows: `[num_slots, W]`, the target's features of each slot of the target's pool.
    """

    head: DraftHead
    pool: KvPool
    batches: RoundBatches
    feature_rows: Tensor

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """Computes the open rows and returns the trees that grow from the last of them."""
        tree = self.batches.shape.tree
        growth = TreeGrowth(tree)
        batch, feature_slots = self.batches.of_open_rows(state)
        hidden = self.head.fuse(self.feature_rows.index_select(0, feature_slots))
        states = self._forward(batch, hidden).index_select(0, batch.logit_rows)
        growth.add(self._children(states, state, sampling, depth=0))
        for level in range(tree.num_steps - 1):
            beam = growth.select_beam()
            batch = self.batches.of_beam(state, beam, level)
            states = self._forward(batch, parent_states(states, beam.parents))
            growth.add(self._children(states, state, sampling, depth=level + 1))
        roots = state.open_tokens.gather(1, state.num_open.unsqueeze(1) - 1).squeeze(1)
        return self.batches.of_trees(state, tree_rows(growth.select(), roots, tree.num_steps))

    def _forward(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        return self.head.forward(batch, hidden, self.pool)

    def _children(
        self, states: Tensor, state: RoundState, sampling: RoundSampling, *, depth: int
    ) -> Children:
        logits = self.head.logits(states)
        scores = sampling.confidence(logits, state, depth)
        topk = self.batches.shape.tree.topk
        return choose_children(scores.view(state.num_slots, -1, logits.shape[1]), topk)
