"""Trees of a language model that are grown in one pass on its device."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.drafters.draft_kv import SequenceKv
from services.draft.drafters.drafter import Proposal
from services.draft.drafters.tail import Tail
from services.draft.drafters.whole_trees import pass_sampling
from services.draft.sequence import DraftSequence
from shared.runtime.open_sequence import OpenSequence
from shared.runtime.tree_grower import GrowingTrees, PassTree, TreeGrower
from shared.tokens import TreeShape


class StandaloneTrees:
    """Grows what `StandaloneDrafter` grows level by level, with one copy to the host."""

    def __init__(self, grower: TreeGrower) -> None:
        self._grower = grower

    @property
    def max_sequences(self) -> int:
        """Of one pass."""
        return self._grower.limits.max_sequences

    def max_open_rows(self, shape: TreeShape) -> int:
        """Returns most committed tokens of a sequence that a pass computes."""
        return self._grower.max_open_rows(shape)

    def launch(
        self, sequences: Sequence[tuple[DraftSequence, SequenceKv]], shape: TreeShape
    ) -> GrowingTrees:
        """Starts to compute the tokens that are left of each sequence, and a tree behind them.
        They count as computed from then on."""
        return self._grower.launch([_open(*each) for each in sequences], (), shape)

    def capture_next(self) -> bool:
        """See `TreeGrower.capture_next`."""
        return self._grower.capture_next()

    def finish(self, sequence: DraftSequence, kv: SequenceKv, grown: PassTree) -> Proposal:
        """Takes in what a pass computed."""
        tail = Tail(kv.num_computed, sequence.token_ids[-1])
        above = [tail.root]
        for token_ids, parents in grown.levels:
            above = [
                tail.add(above[place], token)
                for token, place in zip(token_ids, parents, strict=True)
            ]
        kv.tail = tail
        return Proposal(sequence, grown.tree)


def _open(sequence: DraftSequence, kv: SequenceKv) -> OpenSequence:
    start = kv.num_computed
    kv.num_computed, kv.tail = sequence.num_tokens - kv.window_start, None
    return OpenSequence(
        token_ids=sequence.token_ids[kv.window_start + start :],
        num_computed=start,
        num_before=kv.window_start - 1,
        sampling=pass_sampling(sequence),
        pages=kv.lease.pages,
    )
