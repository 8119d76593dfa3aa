"""Rounds of several shapes with one head: a runner each, of which one has the sequences."""

from __future__ import annotations

import logging
from collections import deque

import torch

from services.target.rounds.round_source import RoundSource
from shared.runtime.round_graphs import ROUND_SIZES
from shared.runtime.round_runner import RoundLimits, RoundRunner
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.runner import ModelRunner
from shared.runtime.shortage import Shortage
from shared.tokens import TreeShape

logger = logging.getLogger(__name__)
_USUAL_SIZE = 8
_CAPTURED_KINDS = (RoundSampling.GREEDY, RoundSampling.DRAWN)


class RoundRunners:
    """Owned by the engine thread.

    Args:
        feature_rows: `[num_slots, W]`, a row for each slot of the target's pool.

    Attributes:
        current: takes the sequences.
        shape: of its trees, as it was asked for.
    """

    def __init__(
        self, source: RoundSource, runner: ModelRunner, feature_rows: torch.Tensor
    ) -> None:
        self._device, self._cache = runner.device, runner.cache
        # Rounds of two shapes are never under way at once, so their graphs share memory.
        memory = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self._capacities = {source.tree: source.max_sequences, **source.other_trees}
        self._runners = {
            shape: RoundRunner(
                decoder=runner.decoder,
                pool=runner.pool,
                head=source.head,
                head_pool=source.pool,
                feature_rows=feature_rows,
                tree=shape,
                limits=RoundLimits(max_sequences, source.max_context_tokens),
                graph_memory=memory,
            )
            for shape, max_sequences in self._capacities.items()
        }
        self.shape = source.tree
        self.current = self._runners[source.tree]
        self._left: deque[tuple[TreeShape, int]] = deque()
        self._begin()

    @property
    def max_sequences(self) -> int:
        """Most sequences of a round of any shape."""
        return max(self._capacities.values())

    @property
    def capacity(self) -> int:
        """Most sequences of a round of the current shape."""
        return self._capacities[self.shape]

    @property
    def max_tree_rows(self) -> int:
        """Most rows of a tree of any shape, the root included."""
        return max(1 + shape.max_node_count for shape in self._capacities)

    @property
    def are_several(self) -> bool:
        """Whether there is more than one shape."""
        return len(self._capacities) > 1

    @property
    def num_captured(self) -> int:
        """Graphs of all shapes."""
        return sum(each.num_captured for each in self._runners.values())

    def num_computed(self, num_sequences: int) -> int:
        """Returns how many slots the shape that takes most computes for so many sequences."""
        widest = max(self._capacities, key=lambda shape: self._capacities[shape])
        return self._runners[widest].num_computed(num_sequences)

    def shapes_for(self, num_sequences: int) -> tuple[TreeShape, ...]:
        """Returns the shapes that take so many sequences, the draft's own first."""
        return tuple(shape for shape, most in self._capacities.items() if most >= num_sequences)

    def turn_to(self, shape: TreeShape) -> None:
        """Takes rounds of another shape from now on; no sequence takes part."""
        assert not self.current.sequence_ids, "sequences would stay behind"
        assert not self.current.num_pending, "a round would be lost"
        self.shape, self.current = shape, self._runners[shape]

    def confine(self, num_sequences: int, shortage: Shortage) -> None:
        """The current shape does not fit the memory for so many sequences; it goes on for fewer,
        if there are."""
        self._capacities[self.shape] = num_sequences - 1
        logger.warning(
            "no memory for rounds of %d sequences with trees of %s; from now on such rounds have "
            "%d at most: %s",
            *(num_sequences, _name(self.shape), num_sequences - 1, self._cache.advice(shortage)),
        )

    def capture_next(self) -> bool:
        """Makes the graphs of one size that are left, the smallest first; returns whether it did.

        A round that comes before its graphs captures them.
        """
        while self._left:
            shape, count = self._left.popleft()
            if count <= self._capacities[shape]:
                self._capture(shape, count)
                return True
        return False

    def _begin(self) -> None:
        """Makes the graphs that the first requests meet. Where shapes are chosen, each of them is
        tried at any size, so all others are left for when there is time."""
        own = [count for count in self._sizes(self.shape) if count <= _USUAL_SIZE]
        for count in own:
            if not self._capture(self.shape, count):
                break
        if self.are_several:
            sizes = [(shape, count) for shape in self._runners for count in self._sizes(shape)]
            sizes = [each for each in sizes if each not in {(self.shape, count) for count in own}]
            self._left.extend(sorted(sizes, key=lambda each: each[1]))

    def _sizes(self, shape: TreeShape) -> list[int]:
        return sorted({min(size, self._capacities[shape]) for size in ROUND_SIZES})

    def _capture(self, shape: TreeShape, num_sequences: int) -> bool:
        """Makes the graphs of one size; False where they do not fit the memory."""
        before = self._num_reserved_bytes()
        try:
            for kind in _CAPTURED_KINDS:
                self._runners[shape].capture(num_sequences, kind)
        except RuntimeError as error:
            self._without_memory(shape, num_sequences, self._cache.advice(Shortage.of(error)))
            return False
        taken = (self._num_reserved_bytes() - before) / 2**30
        logger.debug("rounds, %s, %d sequences: %.2f GiB", _name(shape), num_sequences, taken)
        return True

    def _without_memory(self, shape: TreeShape, num_sequences: int, advice: str) -> None:
        """The graphs of a size do not fit. The shape is left out for it and for more; where it is
        the only one, memory may yet be found."""
        if not self.are_several:
            logger.warning("rounds on the device are confined to what memory is left: %s", advice)
            return
        sizes = [0, *(size for size in self._sizes(shape) if size < num_sequences)]
        self._capacities[shape] = sizes[-1]
        logger.warning(
            "no memory for rounds with trees of %s and more than %d sequences: left out. %s",
            *(_name(shape), sizes[-1], advice),
        )
        torch.cuda.empty_cache()

    def _num_reserved_bytes(self) -> int:
        is_cuda = self._device.type == "cuda"
        return torch.cuda.memory_reserved(self._device) if is_cuda else 0


def _name(shape: TreeShape) -> str:
    return f"{shape.num_steps} steps, {shape.topk} wide, {shape.num_draft_tokens} rows"
