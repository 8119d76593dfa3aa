"""The parts of a round for any number of slots: CUDA graphs, or the same code run eagerly.

A round is three graphs: the trees grow, the target computes them, the accepted paths are committed.
The host queues the draw between the last two. So no kind of sampling needs a graph of its own, and
the host can compute grammar masks beside the forward. A graph fixes shapes and addresses: there is
one set for each number of slots, and for each kind of noise in the draft.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.runtime.graphs import capturing, unowned_view
from shared.runtime.lane_sampling import LaneMasks, LaneSampling, QueuedLogprobs
from shared.runtime.round_batches import RoundTree
from shared.runtime.round_state import RoundSampling, RoundState
from shared.runtime.round_verification import (
    RESULT_COUNTS,
    CommittedRound,
    RoundVerification,
    VerifiedTrees,
)
from shared.speculation.tree import TreeRows

ROUND_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 72, 96, 128, 144, 192, 256)
"""Numbers of slots that rounds compute; above them, as many as there are sequences."""

_MOST_GREEDY_SLOTS = 32
"""Most slots with graphs for greedy drafts. Above, the time for noise is negligible in a round."""


class TreeSource(Protocol):
    """The first part of a round."""

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """Returns a tree for each slot."""


class RoundChunks(Protocol):
    """Prompt tokens that some slots compute in place of their trees, see `PromptChunks`."""

    def replace(self, tree: RoundTree, state: RoundState) -> None:
        """See `PromptChunks.replace`."""

    def accept(self, drawn: Tensor) -> None:
        """See `PromptChunks.accept`."""


@dataclass(frozen=True, slots=True)
class CapturedRound:
    """Three graphs with their input and output tensors.

    Attributes:
        drawn: `[S, T]` int64, read by `commit`.
    """

    draft: torch.cuda.CUDAGraph
    forward: torch.cuda.CUDAGraph
    commit: torch.cuda.CUDAGraph
    state: RoundState
    tree: RoundTree
    logits: Tensor
    drawn: Tensor
    committed: CommittedRound


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """The results of a round on the device.

    Attributes:
        result: see `CommittedRound`.
    """

    result: Tensor
    logprobs: QueuedLogprobs | None


@dataclass(frozen=True, slots=True)
class _EagerRound:
    """A round without graphs whose trees have grown."""

    state: RoundState
    tree: RoundTree


class RoundGraphs:
    """Rounds over the first slots of one state.

    Args:
        memory: `torch.cuda.graph_pool_handle`, shared with the graphs of other rounds, which must
            not run at the same time. None takes a pool of its own.
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
        self._group = verification.decoder.group
        self._captured: dict[tuple[int, RoundSampling], CapturedRound] = {}
        self._grown: _EagerRound | CapturedRound | None = None
        self._verified: VerifiedTrees | None = None

    def is_made(self, num_slots: int, sampling: RoundSampling) -> bool:
        """Whether all graphs that a round needs are captured."""
        return self._memory is None or self._key(num_slots, sampling) in self._captured

    def make(self, num_slots: int, sampling: RoundSampling) -> None:
        """Captures the graphs of a round, unless it needs none or they are captured."""
        if not self.is_made(num_slots, sampling):
            self.of(num_slots, sampling)

    @torch.inference_mode()
    def grow(self, num_slots: int, sampling: RoundSampling) -> None:
        """Runs the first part of a round of the first slots, at least `num_slots` of them."""
        if self._memory is None:
            state = self._state.first(self.num_computed(num_slots))
            self._grown = _EagerRound(state, self._draft.grow(state, sampling))
        else:
            self._grown = captured = self.of(num_slots, sampling)
            captured.draft.replay()

    @property
    def grown(self) -> TreeRows:
        """The trees grown last."""
        assert self._grown is not None, "nothing was grown"
        return self._grown.tree.rows

    @torch.inference_mode()
    def forward(self, chunks: RoundChunks | None = None) -> None:
        """Runs the target's forward over the trees grown last.

        Args:
            chunks: prompt tokens that some slots compute in place of their trees.
        """
        grown = self._grown
        assert grown is not None, "nothing was grown"
        if chunks is not None:
            chunks.replace(grown.tree, grown.state)
        if isinstance(grown, CapturedRound):
            grown.forward.replay()
        else:
            self._verified = self._verification.forward(grown.tree)

    @torch.inference_mode()
    def commit(
        self,
        sampling: RoundSampling,
        lanes: LaneSampling | None = None,
        chunks: RoundChunks | None = None,
        masks: LaneMasks | None = None,
    ) -> RoundOutput:
        """Runs the rest of the round behind its forward.

        Args:
            sampling: kind of sampling of all lanes, except for those that `lanes` redraws.
            chunks: the chunks of the forward.
            masks: masks of the lanes that the host restricts, by slot; None for none.

        Returns:
            The result; with graphs it is valid until the next round.
        """
        grown, verified = self._grown, self._verified
        assert grown is not None, "nothing was grown"
        if isinstance(grown, CapturedRound):
            logits = grown.logits
            self._draw(logits, grown, sampling, lanes, chunks, masks, grown.drawn)
            grown.commit.replay()
            committed = grown.committed
        else:
            assert verified is not None, "nothing was computed"
            self._verified, logits = None, verified.logits
            drawn = torch.empty_like(grown.tree.rows.depths)
            self._draw(logits, grown, sampling, lanes, chunks, masks, drawn)
            committed = self._verification.finish(grown.state, grown.tree, verified.output, drawn)
        if lanes is None:
            return RoundOutput(committed.result, None)
        lanes.committed(committed.result, RESULT_COUNTS)
        tokens = committed.result[:, RESULT_COUNTS:]
        return RoundOutput(committed.result, lanes.logprobs(logits, committed.rows, tokens))

    def of(self, num_slots: int, sampling: RoundSampling) -> CapturedRound:
        """Returns the graphs for at least `num_slots`; the first use captures them."""
        key = self._key(num_slots, sampling)
        if key not in self._captured:
            with torch.inference_mode():
                self._captured[key] = self._capture(*key)
        return self._captured[key]

    @property
    def num_captured(self) -> int:
        """Captured sets of graphs."""
        return len(self._captured)

    def num_computed(self, num_slots: int) -> int:
        """Returns how many slots a round of `num_slots` computes."""
        return num_computed(num_slots, self._state.num_slots)

    def _key(self, num_slots: int, sampling: RoundSampling) -> tuple[int, RoundSampling]:
        """Returns slots and kind of draft noise. Top-k, top-p and min-p shape no tree, and noise
        costs little beside many rows, so two kinds are enough."""
        computed = self.num_computed(num_slots)
        is_greedy = sampling is RoundSampling.GREEDY and computed <= _MOST_GREEDY_SLOTS
        return computed, RoundSampling.GREEDY if is_greedy else RoundSampling.DRAWN

    def _draw(
        self,
        logits: Tensor,
        grown: _EagerRound | CapturedRound,
        sampling: RoundSampling,
        lanes: LaneSampling | None,
        chunks: RoundChunks | None,
        masks: LaneMasks | None,
        drawn: Tensor,
    ) -> None:
        state, rows = grown.state, grown.tree.rows
        applied = None
        if masks is not None and lanes is not None:
            applied = lanes.masked(logits, masks, drawn.shape[1])
        if self._group is None or self._group.rank == 0:
            drawn.copy_(self._verification.draw(logits, state, rows, sampling))
        if lanes is not None:
            lanes.redraw(drawn, logits, state, rows)
        if applied is not None:
            applied.drawn(drawn)
        if chunks is not None:
            chunks.accept(drawn)
        if self._group is not None:
            self._group.broadcast(drawn)

    def empty_round(self, num_slots: int, sampling: RoundSampling) -> Callable[[], TreeRows]:
        """Returns a function that queues a round of empty slots without graphs, and returns its
        trees."""
        num_slots, sampling = self._key(num_slots, sampling)
        state = self._state.first(num_slots).emptied()

        def queue() -> TreeRows:
            tree = self._draft.grow(state, sampling)
            verified = self._verification.forward(tree)
            drawn = self._verification.draw(verified.logits, state, tree.rows, sampling)
            self._verification.finish(state, tree, verified.output, drawn.contiguous())
            return tree.rows

        return queue

    def _capture(self, num_slots: int, sampling: RoundSampling) -> CapturedRound:
        state = self._state.first(num_slots)
        # A round of empty slots loads kernels and allocates workspaces outside of the graphs.
        drawn = torch.zeros_like(self.empty_round(num_slots, sampling)().depths)
        draft, forward, commit = (torch.cuda.CUDAGraph() for _ in range(3))
        with capturing(draft, self._memory, group=self._group):
            tree = self._draft.grow(state, sampling)
        with capturing(forward, self._memory, group=self._group):
            verified = self._verification.forward(tree)
        with capturing(commit, self._memory, group=self._group):
            committed = self._verification.finish(state, tree, verified.output, drawn)
        logits = unowned_view(verified.logits)
        return CapturedRound(draft, forward, commit, state, tree, logits, drawn, committed)


def num_computed(num_slots: int, max_slots: int) -> int:
    """Returns how many of `max_slots` slots a round of the first `num_slots` computes."""
    place = bisect_left(ROUND_SIZES, num_slots)
    return min(ROUND_SIZES[place] if place < len(ROUND_SIZES) else num_slots, max_slots)
