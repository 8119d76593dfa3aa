"""Scores and draws of a round's rows from the sampling parameters of their slots."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch
from torch import Tensor

from shared.runtime.round_state import RoundState
from shared.speculation.distributions import coupled_confidence
from shared.speculation.noise import gumbel_noise
from shared.speculation.row_sampling import RowSampling, sampling_of_columns
from shared.speculation.verify import draw_tokens
from shared.tokens import SamplingParams

_MAX_CUT_ROWS = 512


class RoundSampling(enum.Enum):
    """The sampling that the slots of a round need; each kind includes those before it.

    The rule is the coupled one; `LaneSampling` draws for lanes with penalties, bias or bans.
    """

    GREEDY = 0
    DRAWN = 1
    CUT = 2

    @classmethod
    def of(
        cls, params: Iterable[SamplingParams], drafted: Iterable[SamplingParams] = ()
    ) -> RoundSampling:
        """Returns the least kind that draws for all of `params`, and drafts for `drafted` too."""
        kinds = [_kind_of(each) for each in params]
        kinds += [cls.GREEDY if each.is_greedy else cls.DRAWN for each in drafted]
        return max(kinds, key=_rank, default=cls.GREEDY)

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
        num_slots, num_rows = depths.shape
        # Cuts sort a row, in several times its memory.
        size = max(_MAX_CUT_ROWS // num_rows, 1) if self is RoundSampling.CUT else num_slots
        drawn = []
        for first in range(0, num_slots, size):
            own = slice(first, min(first + size, num_slots))
            rows = self._rows(state.of(own), num_rows)
            own_logits = logits[own.start * num_rows : own.stop * num_rows]
            drawn.append(draw_tokens(own_logits, rows, positions[own].flatten()))
        return (drawn[0] if len(drawn) == 1 else torch.cat(drawn)).view(depths.shape)

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
