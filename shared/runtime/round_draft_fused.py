"""`RoundDraft` on CUDA: a level of the tree in a dozen launches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.layers.attention import ForwardContext, plan_for
from shared.models.heads.layers import HeadRows, SplitHeadLayer
from shared.runtime.round_batches import RoundTree
from shared.runtime.round_draft import RoundDraft, ScoredRows
from shared.runtime.round_growth import FusedGrowth, lay_out_open_rows
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState


@dataclass(frozen=True, slots=True, eq=False)
class FusedRoundDraft(RoundDraft):
    """Top-k, top-p and min-p are left out of the draft's scores; they cost more than they gain."""

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """See `RoundDraft.grow`."""
        batch, feature_slots = lay_out_open_rows(state, self.batches)
        return self._fused_growth(state, sampling, batch, feature_slots).finish()[0]

    def grow_scored(
        self, state: RoundState, sampling: RoundSampling, feature_slots: Tensor
    ) -> ScoredRows:
        """See `RoundDraft.grow_scored`."""
        batch, _ = lay_out_open_rows(state, self.batches)
        growth = self._fused_growth(state, sampling, batch, feature_slots)
        tree, paths = growth.finish()
        return ScoredRows(tree.rows, paths, growth.beams())

    def kind_of(self, sampling: RoundSampling) -> RoundSampling:
        """See `RoundDraft.kind_of`."""
        return RoundSampling.DRAWN if sampling is RoundSampling.CUT else sampling

    def _fused_growth(
        self,
        state: RoundState,
        sampling: RoundSampling,
        batch: ForwardBatch,
        feature_slots: Tensor,
    ) -> FusedGrowth:
        growth = FusedGrowth(state, self.batches, sampling, self.head.vocabulary.token_ids)
        hidden = self.head.fuse(self.feature_rows.index_select(0, feature_slots))
        states, logits = self._level(batch, hidden, None, batch.logit_rows)
        growth.add(logits)
        for _ in range(self.batches.shape.tree.num_steps - 1):
            batch, parents = growth.beam()
            states, logits = self._level(batch, states, parents, None)
            growth.add(logits)
        return growth

    def _level(
        self, batch: ForwardBatch, hidden: Tensor, sources: Tensor | None, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns states `[R, H]` and own logits `[R, Vd]` of the wanted rows, None being all."""
        head, layer = self.head, self.head.layers[0]
        assert isinstance(layer, SplitHeadLayer)
        rows = HeadRows(batch.token_ids, head.embedding, hidden, sources)
        stream, update = layer.advance(rows, self._context(batch))
        norm = layer.state_norm or head.vocabulary.norm
        if norm is None:
            states = stream + update
            states = states if wanted is None else states.index_select(0, wanted)
            return states, head.vocabulary.lm_head(states)
        states, normed = norm.add(stream, update, wanted)
        logits = head.vocabulary.lm_head(normed)
        return states if layer.state_norm is None else normed, logits

    def _context(self, batch: ForwardBatch) -> ForwardContext:
        head = self.head
        shape = head.layers[0].attention.shape
        plans = {shape.sliding_window: plan_for(batch, shape, head.attention_backend)}
        return ForwardContext(batch, self.pool, *head.rotary.tables(batch.positions), plans)
