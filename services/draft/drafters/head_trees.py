"""Trees of a head that its device grows in one pass, and trees whose nodes it computes in one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.draft.drafters.branches import Wanted
from services.draft.drafters.grown_rows import GrownRows
from services.draft.drafters.head_contexts import HeadContexts
from services.draft.drafters.likely_branches import num_choices
from services.draft.drafters.pass_graphs import PassUse
from services.draft.drafters.whole_trees import batches
from services.draft.sequence import DraftSequence
from shared.runtime.growing_trees import GrowingTrees, PassRows
from shared.runtime.open_sequence import OpenSequence
from shared.runtime.tree_grower import TreeGrower
from shared.tokens import TokenTree, TreeShape


class HeadTrees:
    """Computes what `EagleDrafter` computes level by level, with one copy to the host."""

    def __init__(self, grower: TreeGrower, contexts: HeadContexts) -> None:
        self._grower, self._split = grower, grower.split()
        self._contexts = contexts

    @property
    def max_sequences(self) -> int:
        """Trees of one pass."""
        return self._grower.limits.max_sequences

    def uses(self, shape: TreeShape, num_sequences: int, budget: int) -> list[PassUse]:
        """See `PassGraphs`."""
        choices = num_choices(shape, budget)
        grown = PassUse(self._grower, num_sequences, choices)
        walked = PassUse(self._grower, num_sequences, choices, is_walk=True)
        branches = PassUse(self._split, num_sequences * budget, 0)
        return [grown, walked, branches] if budget else [grown]

    def grow(
        self, sequences: Sequence[DraftSequence], shape: TreeShape, num_choices: int
    ) -> list[GrownRows]:
        """Computes the committed rows that are left of each sequence, and a tree behind them.

        Args:
            sequences: that `grows_whole`, with room for both and features of every row.
            num_choices: see `TreeGrower.launch`.
        """
        return [
            each
            for batch in batches(sequences, self.max_sequences)
            for each in self._grow(batch, shape, num_choices)
        ]

    def can_walk(self, shape: TreeShape, num_sequences: int, num_choices: int) -> bool:
        """Whether a `walk` of so many trees waits for no graph."""
        return PassUse(self._grower, num_sequences, num_choices, is_walk=True).is_ready(shape)

    def walk(
        self,
        sequences: Sequence[DraftSequence],
        trees: Sequence[TokenTree],
        shape: TreeShape,
        num_choices: int,
    ) -> list[GrownRows]:
        """Computes the committed rows that are left of each sequence, and a given tree behind them;
        waits for nothing.

        Args:
            sequences: at most `max_sequences`; see `grow`.
            shape: see `TreeGrower.walk`.
        """
        rows, features = self._open(sequences, shape)
        walked = self._grower.walk(rows, features, trees, shape, num_choices=num_choices)
        self._let_go(sequences)
        return list(map(GrownRows, walked))

    def num_branch_rows(self, shape: TreeShape) -> int:
        """See `BranchTrees`: nothing is chosen behind the leaves."""
        return (shape.num_steps - 1) * shape.topk

    def begin(
        self, wanted: Sequence[Wanted], rows: Sequence[OpenSequence], num_choices: int
    ) -> GrowingTrees:
        """See `BranchTrees.begin`: the states of accepted nodes stand in for features."""
        self._contexts.move()
        states = PassRows.states(each.rows.row(each.accepted) for each in wanted)
        return self._split.begin(rows, states, wanted[0].plan.shape, num_choices=num_choices)

    def _grow(
        self, sequences: Sequence[DraftSequence], shape: TreeShape, num_choices: int
    ) -> list[GrownRows]:
        rows, features = self._open(sequences, shape)
        growing = self._grower.launch(rows, features, shape, num_choices=num_choices)
        # The device computes meanwhile.
        self._let_go(sequences)
        return list(map(GrownRows, growing.read()))

    def _open(
        self, sequences: Sequence[DraftSequence], shape: TreeShape
    ) -> tuple[list[OpenSequence], list[Tensor]]:
        """Lays out the committed rows that are left, and the features that they read."""
        contexts, most = self._contexts, self._grower.max_open_rows(shape)
        counts = [(each, contexts.backlog(each)) for each in sequences]
        # After a prompt, or a deeper tree of another draft, there is more than a pass can take.
        excess = [(each, count - most) for each, count in counts if count > most]
        if excess:
            contexts.compute(excess, with_logits=False)
        features = contexts.features([(each, min(count, most)) for each, count in counts])
        return [contexts.open_sequence(each) for each in sequences], features

    def _let_go(self, sequences: Sequence[DraftSequence]) -> None:
        for sequence in sequences:
            self._contexts.publish(sequence)
            self._contexts.drop_features(sequence)
