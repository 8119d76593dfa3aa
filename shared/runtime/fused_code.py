"""CUDA code that all kinds of drafts share."""

from __future__ import annotations

from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.runtime.round_batches import RoundBatches
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
        return None
