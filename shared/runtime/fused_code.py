"""CUDA code that all kinds of drafts share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.partials import total_of
from shared.kv.batch import ForwardBatch
from shared.layers.attention import ForwardContext, plan_for
from shared.models.heads.head import HeadRows, SplitHeadLayer
from shared.runtime.decoder_draft import DecoderDraft
from shared.runtime.round_batches import RoundBatches
from shared.runtime.round_draft import RoundDraft
from shared.runtime.round_growth import FusedGrowth, lay_out_open_rows
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_scores import FusedScores
from shared.runtime.round_state import RoundState
from shared.runtime.tree_draft import Growth, Scores


class FusedCode:
    """The part of `DraftCode` around the forwards.

    Top-k, top-p and min-p are left out of the draft's scores; they cost more than they gain.
    """

    __slots__ = ()
    batches: RoundBatches

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

    def _scores(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> FusedScores:
        tree = self.batches.shape.tree
        return FusedScores(state, tree, sampling, self._token_map, num_choices)

    @property
    def _token_map(self) -> Tensor | None:
        """The target's tokens by the model's own; None where they are the same."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoderDraft(FusedCode, DecoderDraft):
    def logits(self, batch: ForwardBatch) -> Tensor:
        """See `DecoderDraft.logits`."""
        hidden = self.decoder.forward(batch, self.pool).hidden
        # The kernels read any float type.
        return self.decoder.own_logits(hidden.index_select(0, batch.logit_rows), self.decoder.dtype)

    @property
    def _token_map(self) -> Tensor | None:
        return self.decoder.token_map


@dataclass(frozen=True, slots=True, eq=False)
class FusedRoundDraft(FusedCode, RoundDraft):
    """A head's norms and sums are parts of its kernels."""

    def level(
        self, batch: ForwardBatch, hidden: Tensor, sources: Tensor | None, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `RoundDraft.level`."""
        head, layer = self.head, self.head.layers[0]
        assert isinstance(layer, SplitHeadLayer)
        rows = HeadRows(batch.token_ids, head.embedding, hidden, sources)
        stream, update = layer.advance(rows, self._context(batch))
        norm = layer.state_norm or head.vocabulary.norm
        if norm is None:
            states = stream + total_of(update)
            states = states if wanted is None else states.index_select(0, wanted)
            return states, states
        states, normed = norm.add(stream, update, wanted)
        return states if layer.state_norm is None else normed, normed

    def logits(self, read: Tensor) -> Tensor:
        """See `RoundDraft.logits`; over the head's own vocabulary."""
        return self.head.vocabulary.lm_head(read)

    def _context(self, batch: ForwardBatch) -> ForwardContext:
        head = self.head
        shape = head.layers[0].attention.shape
        plans = {shape.sliding_window: plan_for(batch, shape, head.attention_backend)}
        return ForwardContext(batch, self.pool, *head.rotary.tables(batch.positions), plans)

    @property
    def _token_map(self) -> Tensor | None:
        return self.head.vocabulary.token_ids
