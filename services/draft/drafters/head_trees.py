"""Trees of a head that are grown in one pass on its device."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.drafters.drafter import Proposal
from services.draft.drafters.head_contexts import HeadContexts
from services.draft.drafters.whole_trees import batches
from services.draft.sequence import DraftSequence
from shared.runtime.tree_grower import TreeGrower
from shared.tokens import TreeShape


class HeadTrees:
    """Grows what `EagleDrafter` grows level by level, with one copy to the host."""

    def __init__(self, grower: TreeGrower, contexts: HeadContexts) -> None:
        self._grower = grower
        self._contexts = contexts

    def grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Computes the committed rows that are left of each sequence, and a tree behind them.

        Args:
            sequences: that `grows_whole`, with room for both and features of every row.
        """
        most = self._grower.limits.max_sequences
        return [each for batch in batches(sequences, most) for each in self._grow(batch, shape)]

    def capture_next(self, shape: TreeShape) -> bool:
        """See `TreeGrower.capture_next`."""
        return self._grower.capture_next(shape)

    def is_ready(self, shape: TreeShape, num_sequences: int) -> bool:
        """See `TreeGrower.is_ready`."""
        return self._grower.is_ready(shape, num_sequences)

    def capture_for(self, shape: TreeShape, num_sequences: int) -> bool:
        """Captures one graph of those that `is_ready` asks for; returns whether one was left."""
        return self._grower.capture_next(shape, num_sequences=num_sequences)

    def _grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        contexts = self._contexts
        self._catch_up(sequences, self._grower.max_open_rows(shape))
        features = contexts.features([(each, contexts.backlog(each)) for each in sequences])
        rows = [contexts.open_sequence(each) for each in sequences]
        growing = self._grower.launch(rows, features, shape)
        # The device computes meanwhile.
        for sequence in sequences:
            contexts.publish(sequence)
            contexts.drop_features(sequence)
        grown = zip(sequences, growing.read(), strict=True)
        return [Proposal(sequence, each.tree) for sequence, each in grown]

    def _catch_up(self, sequences: Sequence[DraftSequence], num_left: int) -> None:
        """Computes what a pass cannot take, after a prompt or a deeper tree of another draft."""
        backlogs = ((each, self._contexts.backlog(each) - num_left) for each in sequences)
        due = [(sequence, count) for sequence, count in backlogs if count > 0]
        if due:
            self._contexts.compute(due, with_logits=False)
