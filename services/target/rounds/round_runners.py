"""Rounds of several shapes with one head: a runner each, of which one has the sequences."""

from __future__ import annotations

import logging

import torch

from services.target.rounds.round_source import RoundSource
from shared.runtime.round_graphs import ROUND_SIZES
from shared.runtime.round_runner import RoundLimits, RoundRunner
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.runner import ModelRunner
from shared.tokens import TreeShape

logger = logging.getLogger(__name__)
_USUAL_SIZES = (1, 2, 4, 8)
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
        self._device = runner.device
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
        self._capture()

    @property
    def max_sequences(self) -> int:
        """Most sequences of a round of any shape."""
        return max(self._capacities.values())

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

    def confine(self, num_sequences: int) -> None:
        """The current shape does not fit the memory for so many sequences; it goes on for fewer,
        if there are."""
        self._capacities[self.shape] = num_sequences - 1
        logger.warning(
            "no memory for rounds of %d sequences with trees of %s; from now on such rounds have "
            "%d at most",
            *(num_sequences, _name(self.shape), num_sequences - 1),
        )

    def _capture(self) -> None:
        """Makes the usual graphs before anyone waits for them; where shapes are chosen, those of
        all sizes, since each is tried at any time."""
        for shape in list(self._runners):
            before, fitting = self._num_reserved_bytes(), 0
            try:
                for count in self._captured_sizes(shape):
                    for kind in _CAPTURED_KINDS:
                        self._runners[shape].capture(count, kind)
                    fitting = count
            except torch.OutOfMemoryError:
                self._without_memory(shape, fitting)
            taken = self._num_reserved_bytes() - before
            logger.info("graphs of rounds, %s, took %.2f GiB", _name(shape), taken / 2**30)

    def _captured_sizes(self, shape: TreeShape) -> list[int]:
        sizes = ROUND_SIZES if self.are_several else _USUAL_SIZES
        return sorted({min(size, self._capacities[shape]) for size in sizes})

    def _without_memory(self, shape: TreeShape, num_fitting: int) -> None:
        """Graphs of a shape fit for so many sequences at most. It is left out for more; the
        draft's own, where it is the only one, may yet find memory."""
        if not self.are_several:
            logger.warning("rounds on the device are confined to what memory is left")
            return
        self._capacities[shape] = num_fitting
        logger.warning(
            "no memory for rounds with trees of %s and more than %d sequences: left out",
            *(_name(shape), num_fitting),
        )
        torch.cuda.empty_cache()

    def _num_reserved_bytes(self) -> int:
        is_cuda = self._device.type == "cuda"
        return torch.cuda.memory_reserved(self._device) if is_cuda else 0


def _name(shape: TreeShape) -> str:
    return f"{shape.num_steps} steps, {shape.topk} wide, {shape.num_draft_tokens} rows"
