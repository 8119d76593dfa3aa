"""`DecoderDraft` on CUDA: what follows a level's logits in two launches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.runtime.decoder_draft import DecoderDraft
from shared.runtime.round_draft import GrowthLevels, ScoredRows
from shared.runtime.round_growth import FusedGrowth, lay_out_open_rows
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoderDraft(DecoderDraft):
    """Leaves out of the scores what `FusedRoundDraft` leaves out."""

    def grow_levels(
        self, state: RoundState, sampling: RoundSampling, feature_slots: Tensor
    ) -> GrowthLevels:
        """See `DecoderDraft.grow_levels`."""
        growth = FusedGrowth(state, self.batches, sampling, None, self.num_choices)
        batch, _ = lay_out_open_rows(state, self.batches)
        growth.add(self._logits(batch))
        for _ in range(self.batches.shape.tree.num_steps - 1):
            yield None
            batch, _ = growth.beam()
            growth.add(self._logits(batch))
        tree, paths = growth.finish()
        yield ScoredRows(tree.rows, paths, growth.beams())
        if not self.num_choices:
            return None
        batch, _ = growth.beam()
        growth.look(self._logits(batch))
        return growth.choices()

    def kind_of(self, sampling: RoundSampling) -> RoundSampling:
        """See `RoundDraft.kind_of`."""
        return RoundSampling.DRAWN if sampling is RoundSampling.CUT else sampling

    def _logits(self, batch: ForwardBatch) -> Tensor:
        hidden = self.decoder.forward(batch, self.pool).hidden
        # The kernels read any float type.
        return self.decoder.logits(hidden.index_select(0, batch.logit_rows), self.decoder.dtype)
