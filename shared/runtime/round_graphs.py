"""The two parts of a round for any number of slots: CUDA graphs, or the same code as it is.

A graph fixes shapes and addresses, so there is one pair for each number of slots and each kind of
sampling. The trees pass from the first to the second on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.runtime.capture import capturing
from shared.runtime.round_batches import RoundTree
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState
from shared.runtime.round_verification import RoundVerification

ROUND_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
"""Numbers of slots that rounds compute; above, as many as there are sequences."""


class TreeSource(Protocol):
    """The first part of a round."""

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """Returns a tree for each slot."""


@dataclass(frozen=True, slots=True)
class CapturedRound:
    """Two graphs and what they write: `[S, 2 + W]`, see `RoundVerification.decide`."""

    draft: torch.cuda.CUDAGraph
    verification: torch.cuda.CUDAGraph
    result: Tensor


class RoundGraphs:
    """Rounds over the first slots of one state.

    Args:
        memory: of `torch.cuda.graph_pool_handle`, where other rounds have their graphs as well;
            none of them may be under way beside these. None takes some of its own.
    """

    def __init__(
        self,
        draft: TreeSource,
        verification: RoundVerification,
        state: RoundState,
        memory: Any | None = None,
    ) -> None:
        self._draft = draft
        self._verification = verification
        self._state = state
        self._memory = memory
        if memory is None and state.numbers.is_cuda:
            self._memory = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, RoundSampling], CapturedRound] = {}
        self._grown: tuple[RoundState, RoundTree, RoundSampling] | None = None
        self._replayed: CapturedRound | None = None

    def is_made(self, num_slots: int, sampling: RoundSampling) -> bool:
        """Whether a round needs no graphs that are not there."""
        return self._memory is None or (self.num_computed(num_slots), sampling) in self._captured

    def make(self, num_slots: int, sampling: RoundSampling) -> None:
        """Makes sure that the graphs of a round are there, if it takes any."""
        if not self.is_made(num_slots, sampling):
            self.of(num_slots, sampling)

    def grow(self, num_slots: int, sampling: RoundSampling) -> None:
        """Runs the first part of a round of the first slots, at least `num_slots` of them."""
        if self._memory is None:
            with torch.inference_mode():
                state = self._state.first(self.num_computed(num_slots))
                self._grown = state, self._draft.grow(state, sampling), sampling
        else:
            self._replayed = self.of(num_slots, sampling)
            self._replayed.draft.replay()

    def verify(self) -> Tensor:
        """Runs the second part of the round that was grown last.

        Returns:
            See `RoundVerification.decide`. With graphs it holds until the next round.
        """
        if self._replayed is not None:
            self._replayed.verification.replay()
            return self._replayed.result
        assert self._grown is not None, "nothing was grown"
        with torch.inference_mode():
            return self._verification.decide(*self._grown)

    def of(self, num_slots: int, sampling: RoundSampling) -> CapturedRound:
        """Returns the graphs for at least `num_slots`, captured when first asked for."""
        key = (self.num_computed(num_slots), sampling)
        if key not in self._captured:
            with torch.inference_mode():
                self._captured[key] = self._capture(*key)
        return self._captured[key]

    @property
    def num_captured(self) -> int:
        """Pairs of graphs."""
        return len(self._captured)

    def num_computed(self, num_slots: int) -> int:
        """Returns how many slots a round of so many computes."""
        return num_computed(num_slots, self._state.num_slots)

    def _capture(self, num_slots: int, sampling: RoundSampling) -> CapturedRound:
        state = self._state.first(num_slots)
        # Loads kernels and makes the workspaces of products outside of the graphs, for nobody.
        nobody = state.emptied()
        self._verification.decide(nobody, self._draft.grow(nobody, sampling), sampling)
        draft, verification = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with capturing(draft, self._memory):
            tree = self._draft.grow(state, sampling)
        with capturing(verification, self._memory):
            result = self._verification.decide(state, tree, sampling)
        return CapturedRound(draft, verification, result)


def num_computed(num_slots: int, max_slots: int) -> int:
    """Returns how many of `max_slots` slots a round of the first `num_slots` computes."""
    place = bisect_left(ROUND_SIZES, num_slots)
    return min(ROUND_SIZES[place] if place < len(ROUND_SIZES) else num_slots, max_slots)
