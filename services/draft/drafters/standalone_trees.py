"""Trees of a language model that are grown in one pass on its device."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.drafters.draft_kv import SequenceKv
from services.draft.drafters.drafter import Proposal
from services.draft.drafters.standalone_contexts import StandaloneContexts
from services.draft.drafters.tail import Tail
from services.draft.drafters.whole_trees import batches
from services.draft.sequence import DraftSequence
from shared.runtime.tree_grower import PassTree, TreeGrower
from shared.tokens import TreeShape


class StandaloneTrees:
    """Grows what `StandaloneDrafter` grows level by level, with one copy to the host."""

    def __init__(self, grower: TreeGrower, contexts: StandaloneContexts) -> None:
        self._grower = grower
        self._contexts = contexts

    def capture_next(self, shape: TreeShape) -> bool:
        """See `TreeGrower.capture_next`."""
        return self._grower.capture_next(shape)

    def grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Computes the committed tokens that are left of each sequence, and a tree behind them.

        Args:
            sequences: that `grows_whole`, with room for both.
        """
        most = self._grower.limits.max_sequences
        return [each for batch in batches(sequences, most) for each in self._grow(batch, shape)]

    def _grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        contexts, num_left = self._contexts, self._grower.max_open_rows(shape)
        contexts.compute([(each, contexts.backlog(each) - num_left) for each in sequences])
        rows = [contexts.open_sequence(each) for each in sequences]
        contexts.move()
        growing = self._grower.launch(rows, (), shape)
        # The device computes meanwhile.
        for sequence in sequences:
            contexts.publish(sequence)
        grown = growing.read()
        for sequence, each in zip(sequences, grown, strict=True):
            _plant(contexts.kv_of(sequence), sequence.token_ids[-1], each)
        return [
            Proposal(sequence, each.tree) for sequence, each in zip(sequences, grown, strict=True)
        ]


def _plant(kv: SequenceKv, last_token: int, grown: PassTree) -> None:
    """Takes in what a pass computed behind the last committed token."""
    kv.tail = Tail(kv.num_computed, last_token)
    above = [kv.tail.root]
    for token_ids, parents in grown.levels:
        above = [
            kv.tail.add(above[place], token)
            for token, place in zip(token_ids, parents, strict=True)
        ]
