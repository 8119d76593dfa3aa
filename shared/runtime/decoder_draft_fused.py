"""`DecoderDraft` on CUDA: what follows a level's logits in two launches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.runtime.decoder_draft import DecoderDraft
from shared.runtime.round_growth import FusedGrowth, lay_out_open_rows
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_scores import FusedScores
from shared.runtime.round_state import RoundState
from shared.runtime.tree_draft import Growth, Scores


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoderDraft(DecoderDraft):
    """Leaves out of the scores what `FusedRoundDraft` leaves out."""

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

    def logits(self, batch: ForwardBatch) -> Tensor:
        """See `DecoderDraft.logits`."""
        hidden = self.decoder.forward(batch, self.pool).hidden
        # The kernels read any float type.
        return self.decoder.logits(hidden.index_select(0, batch.logit_rows), self.decoder.dtype)

    def _scores(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> FusedScores:
        return FusedScores(state, self.batches.shape.tree, sampling, None, num_choices)
