"""Scores and draws of a round's rows from the sampling parameters of their slots."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from torch import Tensor

from shared.runtime.round_state import RoundState
from shared.speculation.confidence import coupled_confidence
from shared.speculation.noise import gumbel_noise
from shared.speculation.row_sampling import RowSampling, sampling_of_columns
from shared.speculation.verify import draw_tokens
from shared.tokens import SamplingParams


class RoundSampling(enum.Enum):
    """What the slots of a round need: each kind does the work of those before it, and more.

    The rule is the coupled one; penalties, bias and bans are left to the general path.
    """

    GREEDY = 0
    DRAWN = 1
    CUT = 2

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> RoundSampling:
        """Returns the least kind that serves all of `params`."""
        return max((_kind_of(each) for each in params), key=_rank, default=cls.GREEDY)

    def confidence(self, logits: Tensor, state: RoundState, depth: int) -> Tensor:
        """Returns the head's `coupled_confidence` `[S * N, V]` for its logits `[S * N, V]`.

        Args:
            depth: of the rows; the root's is 0.
        """
        num_rows = len(logits) // state.num_slots
        rows = self._rows(state, num_rows)
        if self is RoundSampling.GREEDY:
            return coupled_confidence(logits, rows, None)
        noise = gumbel_noise(state.seeds, state.drawn_positions + depth, logits.shape[1])
        # Rows of one sequence and level draw the token at one position, so they share their noise.
        return coupled_confidence(logits, rows, noise.repeat_interleave(num_rows, dim=0))

    def draw(self, logits: Tensor, state: RoundState, depths: Tensor) -> Tensor:
        """Returns the target's tokens `[S, T]` for its logits `[S * T, V]` and depths `[S, T]`."""
        positions = state.lengths.unsqueeze(1) + depths
        rows = self._rows(state, depths.shape[1])
        return draw_tokens(logits, rows, positions.flatten()).view(depths.shape)

    def _rows(self, state: RoundState, num_rows: int) -> RowSampling:
        return sampling_of_columns(
            state.sampling.repeat_interleave(num_rows, dim=0),
            state.seeds.repeat_interleave(num_rows),
            has_draws=self is not RoundSampling.GREEDY,
            has_cuts=self is RoundSampling.CUT,
        )


def _kind_of(params: SamplingParams) -> RoundSampling:
    if params.is_greedy:
        return RoundSampling.GREEDY
    is_cut = bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0
    return RoundSampling.CUT if is_cut else RoundSampling.DRAWN


def _rank(kind: RoundSampling) -> int:
    return kind.value
