"""Launches what finds the best tokens after rows on CUDA, level by level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shared.kernels.launch import dependent_launch, empties
from shared.runtime.round_growth_jit import choose_tokens, score_blocks
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import LENGTH, OFFSET, SEED, RoundState
from shared.speculation.growth import Children
from shared.tokens import TreeShape

_BLOCK = 1024
# A warp needs no barrier to agree on a maximum: it takes one of 32 lists of keys at a time.
_LISTS_A_WARP = 32
_MAX_WARPS = 8
# Noise is more work than the search.
_SEARCH_WARPS = 1
_NOISE_WARPS = 4


@dataclass(frozen=True, slots=True)
class BestTokens:
    """The best next tokens of R rows.

    Attributes:
        keys: `[R, L, K]` int64, L lists of K tokens each, best first, the best among them.
        maxima: `[R, N]` float32, of N blocks of the vocabulary.
        sums: likewise, of exponentials below the maximum.
    """

    keys: Tensor
    maxima: Tensor
    sums: Tensor


class FusedScores:
    """See `Scores`.

    Args:
        token_map: `[Vd]` int64, the target's id of each of the head's tokens; None when equal.
        num_choices: see `TreeDraft`; where there are none, a tree's children are found.
    """

    def __init__(
        self,
        state: RoundState,
        tree: TreeShape,
        sampling: RoundSampling,
        token_map: Tensor | None,
        num_choices: int,
    ) -> None:
        self._state, self._topk, self.num_choices = state, tree.topk, num_choices
        self._has_draws, self._token_map = sampling is not RoundSampling.GREEDY, token_map
        self._level = self._num_rows = 0
        size = (state.num_slots, 1 + tree.num_steps * tree.topk, num_choices)
        device = state.numbers.device
        self._tokens = torch.empty(size, dtype=torch.int32, device=device)
        self._scores = torch.empty(size, dtype=torch.float32, device=device)

    def look(self, logits: Tensor) -> None:
        """See `Scores.look`."""
        self.best(logits)

    def choices(self) -> Children:
        """See `Scores.choices`; every level was looked at."""
        return Children(self._tokens, self._scores)

    def best(self, logits: Tensor) -> BestTokens:
        """Finds the best tokens after the rows of the next level, `[S * N, Vd]`."""
        state, width = self._state, self.num_choices
        assert logits.is_contiguous()
        num_rows, num_own = logits.shape
        rows = num_rows // state.num_slots
        num_blocks = triton.cdiv(num_own, _BLOCK)
        num_keys, device = width or self._topk, logits.device
        keys = torch.empty((num_rows, num_blocks, num_keys), dtype=torch.int64, device=device)
        maxima, sums = empties(2, (num_rows, num_blocks), torch.float32, device)
        token_map = self._token_map
        score_blocks[(num_rows, num_blocks)](
            logits, logits if token_map is None else token_map, state.numbers, state.sampling,
            keys, maxima, sums,
            self._level, state.numbers.stride(0), num_own, num_blocks,
            ROWS=rows, TOPK=num_keys, HAS_MAP=token_map is not None, HAS_DRAWS=self._has_draws,
            LENGTH=LENGTH, SEED=SEED, OFFSET=OFFSET, BLOCK=_BLOCK,
            num_warps=_NOISE_WARPS if self._has_draws else _SEARCH_WARPS,
            **dependent_launch(device, num_rows),
        )  # fmt: skip
        self._level += 1
        if not width:
            return BestTokens(keys, maxima, sums)
        best = torch.empty((num_rows, 1, width), dtype=torch.int64, device=device)
        lanes = triton.next_power_of_2(max(num_blocks, width))
        choose_tokens[(num_rows,)](
            keys, maxima, sums, best, self._tokens, self._scores,
            num_blocks, self._num_rows, self._tokens.shape[1],
            ROWS=rows, WIDTH=width, LANES=lanes,
            BLOCKS=triton.next_power_of_2(num_blocks), num_warps=num_warps_for(lanes),
            **dependent_launch(device, num_rows),
        )  # fmt: skip
        self._num_rows += rows
        return BestTokens(best, maxima, sums)


def num_warps_for(num_lists: int) -> int:
    """Returns the warps of a program that looks for the best keys of so many lists."""
    return min(max(num_lists // _LISTS_A_WARP, 1), _MAX_WARPS)
