"""Trees of a language model that are grown in one pass on its device."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.drafters.branches import Wanted
from services.draft.drafters.grown_rows import GrownRows
from services.draft.drafters.likely_branches import num_choices
from services.draft.drafters.pass_graphs import PassUse
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

    def uses(self, shape: TreeShape, num_sequences: int, budget: int) -> list[PassUse]:
        """See `PassGraphs`."""
        choices = num_choices(shape, budget)
        grown = PassUse(self._grower, num_sequences, choices)
        branches = PassUse(self._split, num_sequences * budget, choices)
        return [grown, branches] if budget else [grown]

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
