"""Whole trees of a language model that drafts, grown in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.round_batches import RoundBatches
from shared.runtime.round_draft import GrowthLevels, scored_rows
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState
from shared.speculation.growth import Children, TreeGrowth, choose_children


@dataclass(frozen=True, slots=True, eq=False)
class DecoderDraft:
    """Drafts for all slots of a state, in plain torch.

    A model's rows are those of a head one token later: row i reads token i. So the state counts a
    token more than are committed, and its first one is left out of the window.

    Attributes:
        num_choices: W, tokens to find after the root and each computed node, at least as many as
            children; the best leaves are computed for it when the trees are there. 0 for none.
    """

    decoder: Decoder
    pool: KvPool
    batches: RoundBatches
    num_choices: int = 0

    def grow_levels(
        self, state: RoundState, sampling: RoundSampling, feature_slots: Tensor
    ) -> GrowthLevels:
        """See `TreeDraft.grow_levels`; no features are read."""
        tree = self.batches.shape.tree
        growth, beams = TreeGrowth(tree), []
        batch, _ = self.batches.of_open_rows(state)
        levels = [self._children(batch, state, sampling, depth=0)]
        growth.add(levels[0].best(tree.topk))
        for level in range(tree.num_steps - 1):
            yield None
            beams.append(growth.select_beam())
            batch = self.batches.of_beam(state, beams[-1], level)
            levels.append(self._children(batch, state, sampling, depth=level + 1))
            growth.add(levels[-1].best(tree.topk))
        if self.num_choices:
            beams.append(growth.select_beam())
        yield scored_rows(growth.select(), state, tree, beams)
        if not self.num_choices:
            return None
        batch = self.batches.of_beam(state, beams[-1], tree.num_steps - 1)
        levels.append(self._children(batch, state, sampling, depth=tree.num_steps))
        return _joined(levels)

    def kind_of(self, sampling: RoundSampling) -> RoundSampling:
        """See `RoundDraft.kind_of`."""
        return sampling

    def _children(
        self, batch: ForwardBatch, state: RoundState, sampling: RoundSampling, *, depth: int
    ) -> Children:
        hidden = self.decoder.forward(batch, self.pool).hidden.index_select(0, batch.logit_rows)
        logits = self.decoder.logits(hidden)
        scores = sampling.confidence(logits, state, depth)
        width = self.num_choices or self.batches.shape.tree.topk
        return choose_children(scores.view(state.num_slots, -1, logits.shape[1]), width)


def _joined(levels: list[Children]) -> Children:
    return Children(
        torch.cat([each.token_ids for each in levels], dim=1),
        torch.cat([each.log_probs for each in levels], dim=1),
    )
