"""First part of a speculative round: the head takes in what was committed and grows the trees."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState
from shared.speculation.growth import (
    Beam,
    Children,
    SelectedNodes,
    TreeGrowth,
    choose_children,
    parent_states,
)
from shared.speculation.tree_rows import TreeRows, tree_rows
from shared.tokens import TreeShape


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Trees and how likely the target is to accept them.

    Attributes:
        paths: `[S, T]` float32, score of the path to each row; the root's is 0.
        beams: `[2, S, L, K]` int64, token of each node that is computed on each of L levels, and
            the place of its parent in the level before.
    """

    rows: TreeRows
    paths: Tensor
    beams: Tensor


GrowthLevels: TypeAlias = Generator[ScoredRows | None, None, Children | None]
"""Trees that grow in parts: nothing after each forward that others follow, then the trees, and at
the end, where it was asked for, what may follow the root and each of their computed nodes,
`[S, 1 + L * K, W]`."""


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
        batch, feature_slots = self.batches.of_open_rows(state)
        grown = self._grown(state, sampling, batch, feature_slots)
        return self.batches.of_trees(state, grown.rows)

    def grow_scored(
        self, state: RoundState, sampling: RoundSampling, feature_slots: Tensor
    ) -> ScoredRows:
        """Grows as `grow` does for a draft whose target is elsewhere.

        Args:
            state: its `page_table` is not read.
            feature_slots: `[S * W]` int64, the row of `feature_rows` that each open row reads.
        """
        batch, _ = self.batches.of_open_rows(state)
        return self._grown(state, sampling, batch, feature_slots)

    def grow_levels(
        self, state: RoundState, sampling: RoundSampling, feature_slots: Tensor
    ) -> GrowthLevels:
        """See `GrowthLevels`: a head's forwards are too short to stop between them."""
        yield self.grow_scored(state, sampling, feature_slots)
        return None

    def kind_of(self, sampling: RoundSampling) -> RoundSampling:
        """Returns the kind that does all that this draft does for `sampling`."""
        return sampling

    def _grown(
        self,
        state: RoundState,
        sampling: RoundSampling,
        batch: ForwardBatch,
        feature_slots: Tensor,
    ) -> ScoredRows:
        tree = self.batches.shape.tree
        growth, beams = TreeGrowth(tree), []
        hidden = self.head.fuse(self.feature_rows.index_select(0, feature_slots))
        states = self._forward(batch, hidden).index_select(0, batch.logit_rows)
        growth.add(self._children(states, state, sampling, depth=0))
        for level in range(tree.num_steps - 1):
            beam = growth.select_beam()
            beams.append(beam)
            batch = self.batches.of_beam(state, beam, level)
            states = self._forward(batch, parent_states(states, beam.parents))
            growth.add(self._children(states, state, sampling, depth=level + 1))
        return scored_rows(growth.select(), state, tree, beams)

    def _forward(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        return self.head.forward(batch, hidden, self.pool)

    def _children(
        self, states: Tensor, state: RoundState, sampling: RoundSampling, *, depth: int
    ) -> Children:
        logits = self.head.logits(states)
        scores = sampling.confidence(logits, state, depth)
        topk = self.batches.shape.tree.topk
        return choose_children(scores.view(state.num_slots, -1, logits.shape[1]), topk)


def scored_rows(
    nodes: SelectedNodes, state: RoundState, tree: TreeShape, beams: Sequence[Beam]
) -> ScoredRows:
    """Lays out selected nodes behind the last committed tokens.

    Args:
        beams: of each level that is computed.
    """
    roots = state.roots
    none = roots.new_empty((2, state.num_slots, 0, tree.topk))
    levels = [torch.stack((each.token_ids, each.parents)).unsqueeze(2) for each in beams]
    return ScoredRows(
        tree_rows(nodes, roots, tree.num_steps),
        torch.cat((torch.zeros_like(nodes.path[:, :1]), nodes.path), dim=1),
        torch.cat((none, *levels), dim=2),
    )
