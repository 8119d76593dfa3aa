"""Trees of a head that are grown in one pass on its device, for sequences that allow it."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.drafters.drafter import Proposal
from services.draft.drafters.head_contexts import HeadContexts
from services.draft.sequence import DraftSequence
from shared.runtime.tree_grower import TreeGrower
from shared.tokens import TreeShape


class HeadTrees:
    """Grows what `EagleDrafter` grows level by level, with one copy to the host."""

    def __init__(self, grower: TreeGrower, contexts: HeadContexts) -> None:
        self._grower = grower
        self._contexts = contexts

    def takes(self, sequence: DraftSequence) -> bool:
        """Whether a pass can score what the request asks for: greedily, or by the coupled rule
        without penalties and bias."""
        sampling = sequence.sampling
        return (
            not (sequence.draws_chains or sampling.has_penalties or sampling.logit_bias)
            and (sampling.is_greedy or sequence.mirrors_noise)
        )  # fmt: skip

    def grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Computes the committed rows that are left of each sequence, and a tree behind them.

        Args:
            sequences: with room for both, and features of every row.
        """
        most = self._grower.limits.max_sequences
        batches = [sequences[start : start + most] for start in range(0, len(sequences), most)]
        return [proposal for batch in batches for proposal in self._grow(batch, shape)]

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
        return list(map(Proposal, sequences, growing.read()))

    def _catch_up(self, sequences: Sequence[DraftSequence], num_left: int) -> None:
        """Computes what a pass cannot take, after a prompt or a deeper tree of another draft."""
        backlogs = ((each, self._contexts.backlog(each) - num_left) for each in sequences)
        due = [(sequence, count) for sequence, count in backlogs if count > 0]
        if due:
            self._contexts.compute(due, with_logits=False)
