"""Trees of a language model that are grown in one pass on its device."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.drafters.branches import Wanted
from services.draft.drafters.grown_rows import GrownRows
from services.draft.drafters.standalone_contexts import StandaloneContexts
from services.draft.drafters.whole_trees import batches
from services.draft.sequence import DraftSequence
from shared.runtime.growing_trees import GrowingTrees
from shared.runtime.open_sequence import OpenSequence
from shared.runtime.tree_grower import TreeGrower
from shared.tokens import TreeShape


class StandaloneTrees:
    """Grows what `StandaloneDrafter` grows level by level, with one copy to the host."""

    def __init__(self, grower: TreeGrower, contexts: StandaloneContexts) -> None:
        self._grower, self._split = grower, grower.split()
        self._contexts = contexts

    @property
    def max_sequences(self) -> int:
        """Trees that one pass grows."""
        return self._grower.limits.max_sequences

    def capture_next(self, shape: TreeShape, num_choices: int) -> bool:
        """See `TreeGrower.capture_next`; passes that can stop are begun with choices only."""
        growers = (self._grower, self._split) if num_choices else (self._grower,)
        return any(each.capture_next(shape, num_choices=num_choices) for each in growers)

    def is_ready(
        self, shape: TreeShape, num_sequences: int, num_branches: int, num_choices: int
    ) -> bool:
        """Whether every graph is there for passes of so many sequences, and of as many branches as
        all of them may have; none where none are prepared for."""
        return all(
            grower.is_ready(shape, size, num_choices=num_choices)
            for grower, size in self._sizes(num_sequences, num_branches)
        )

    def capture_for(
        self, shape: TreeShape, num_sequences: int, num_branches: int, num_choices: int
    ) -> bool:
        """Captures one graph of those that `is_ready` asks for; returns whether one was left."""
        return any(
            grower.capture_next(shape, num_choices=num_choices, num_sequences=size)
            for grower, size in self._sizes(num_sequences, num_branches)
        )

    def _sizes(self, num_sequences: int, num_branches: int) -> list[tuple[TreeGrower, int]]:
        branches = [(self._split, num_branches)] if num_branches else []
        return [(self._grower, num_sequences), *branches]

    def grow(
        self, sequences: Sequence[DraftSequence], shape: TreeShape, num_choices: int
    ) -> list[GrownRows]:
        """Computes the committed tokens that are left of each sequence, and a tree behind them.

        Args:
            sequences: that `grows_whole`, with room for both.
            num_choices: see `TreeGrower.launch`.
        """
        return [
            each
            for batch in batches(sequences, self.max_sequences)
            for each in self._grow(batch, shape, num_choices)
        ]

    def num_branch_rows(self, shape: TreeShape) -> int:
        """See `BranchTrees`: the leaves are computed, too."""
        return shape.num_steps * shape.topk

    def begin(
        self, wanted: Sequence[Wanted], rows: Sequence[OpenSequence], num_choices: int
    ) -> GrowingTrees:
        """See `BranchTrees.begin`."""
        self._contexts.move()
        return self._split.begin(rows, (), wanted[0].plan.shape, num_choices=num_choices)

    def _grow(
        self, sequences: Sequence[DraftSequence], shape: TreeShape, num_choices: int
    ) -> list[GrownRows]:
        contexts, num_left = self._contexts, self._grower.max_open_rows(shape)
        contexts.compute([(each, contexts.backlog(each) - num_left) for each in sequences])
        rows = [contexts.open_sequence(each) for each in sequences]
        contexts.move()
        growing = self._grower.launch(rows, (), shape, num_choices=num_choices)
        # The device computes meanwhile.
        for sequence in sequences:
            contexts.publish(sequence)
        grown = list(map(GrownRows, growing.read()))
        for sequence, each in zip(sequences, grown, strict=True):
            contexts.plant(sequence, each)
        return grown
