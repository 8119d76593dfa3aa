"""`RoundDraft` on CUDA: a level of the tree in a dozen launches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.partials import total_of
from shared.kv.batch import ForwardBatch
from shared.layers.attention import ForwardContext, plan_for
from shared.models.heads.layers import HeadRows, SplitHeadLayer
from shared.runtime.round_draft import RoundDraft
from shared.runtime.round_growth import FusedGrowth, lay_out_open_rows
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_scores import FusedScores
from shared.runtime.round_state import RoundState
from shared.runtime.tree_draft import Growth, Scores


@dataclass(frozen=True, slots=True, eq=False)
class FusedRoundDraft(RoundDraft):
    """Top-k, top-p and min-p are left out of the draft's scores; they cost more than they gain."""

    def open_rows(self, state: RoundState) -> tuple[ForwardBatch, Tensor]:
        """See `DraftCode.open_rows`."""
        return lay_out_open_rows(state, self.batches)

    def scores(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> Scores:
        """See `DraftCode.scores`."""
        return self._scores(state, sampling, num_choices)

    def growth(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> Growth:
        """See `DraftCode.growth`."""
        scores = self._scores(state, sampling, num_choices)
        return FusedGrowth(state, self.batches, scores)

    def kind_of(self, sampling: RoundSampling) -> RoundSampling:
        """See `DraftCode.kind_of`."""
        return RoundSampling.DRAWN if sampling is RoundSampling.CUT else sampling

    def level(
        self, batch: ForwardBatch, hidden: Tensor, sources: Tensor | None, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `RoundDraft.level`; the logits are over the head's own vocabulary."""
        head, layer = self.head, self.head.layers[0]
        assert isinstance(layer, SplitHeadLayer)
        rows = HeadRows(batch.token_ids, head.embedding, hidden, sources)
        stream, update = layer.advance(rows, self._context(batch))
        norm = layer.state_norm or head.vocabulary.norm
        if norm is None:
            states = stream + total_of(update)
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

    def _scores(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> FusedScores:
        tree, token_map = self.batches.shape.tree, self.head.vocabulary.token_ids
        return FusedScores(state, tree, sampling, token_map, num_choices)
