"""The graphs of the passes that draft with one model, and which of them there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.runtime.tree_grower import TreeGrower
from shared.tokens import TreeShape


@dataclass(frozen=True, slots=True)
class PassUse:
    """Something that passes are used for.

    Attributes:
        num_sequences: most trees at a time.
        num_choices, is_walk: see `PassKind`.
    """

    grower: TreeGrower
    num_sequences: int
    num_choices: int
    is_walk: bool = False

    def is_ready(self, shape: TreeShape) -> bool:
        """See `TreeGrower.is_ready`."""
        return self.grower.is_ready(
            shape, self.num_sequences, num_choices=self.num_choices, is_walk=self.is_walk
        )

    def capture_next(self, shape: TreeShape, *, is_any_size: bool = False) -> bool:
        """See `TreeGrower.capture_next`."""
        return self.grower.capture_next(
            shape,
            num_choices=self.num_choices,
            is_walk=self.is_walk,
            num_sequences=None if is_any_size else self.num_sequences,
        )


class PassGraphs:
    """See `Drafter` on what is prepared.

    Args:
        uses: returns the uses of passes for trees of a shape, for so many sequences that prepare
            for so many verdicts each.
    """

    def __init__(self, uses: Callable[[TreeShape, int, int], Sequence[PassUse]]) -> None:
        self._uses = uses

    def is_prepared(self, shape: TreeShape, num_sequences: int, budget: int) -> bool:
        """Whether all graphs are there.

        Args:
            budget: verdicts to prepare for.
        """
        return all(use.is_ready(shape) for use in self._uses(shape, num_sequences, budget))

    def prepare_for(self, shape: TreeShape, num_sequences: int, budget: int) -> bool:
        """Captures one of these; returns whether one was left."""
        return any(use.capture_next(shape) for use in self._uses(shape, num_sequences, budget))

    def prepare_next(self, shape: TreeShape, budget: int) -> bool:
        """Captures one for any number of sequences; returns whether one was left."""
        uses = self._uses(shape, 1, budget)
        return any(use.capture_next(shape, is_any_size=True) for use in uses)
