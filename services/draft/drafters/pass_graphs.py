"""The graphs of the passes that draft with one model, and which of them there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.draft.drafters.whole_trees import grown_shape
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
        budget: returns for how many they do.
        vocab_size: tokens the model can propose.
    """

    def __init__(
        self,
        uses: Callable[[TreeShape, int, int], Sequence[PassUse]],
        budget: Callable[[], int],
        *,
        vocab_size: int,
    ) -> None:
        self._uses, self._budget, self._vocab_size = uses, budget, vocab_size

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        """Whether all graphs are there."""
        grown = grown_shape(shape, self._vocab_size)
        return all(use.is_ready(grown) for use in self._uses(grown, num_sequences, self._budget()))

    def prepare_for(self, shape: TreeShape, num_sequences: int) -> bool:
        """Captures one of these; returns whether one was left."""
        grown = grown_shape(shape, self._vocab_size)
        uses = self._uses(grown, num_sequences, self._budget())
        return any(use.capture_next(grown) for use in uses)

    def prepare_next(self, shape: TreeShape) -> bool:
        """Captures one for any number of sequences; returns whether one was left."""
        grown = grown_shape(shape, self._vocab_size)
        uses = self._uses(grown, 1, self._budget())
        return any(use.capture_next(grown, is_any_size=True) for use in uses)
