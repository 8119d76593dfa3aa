"""Trees that passes on the device grow, with one copy to the host: after committed tokens, and in
branches, which are computed ahead for possible verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from services.draft.draft_scores import DraftScores, request_scores
from services.draft.drafters.contexts import BranchKv, Contexts, GrownRows, Path
from services.draft.drafters.drafter import VerifiedTree
from services.draft.likely_verdicts import LikelyVerdict
from services.draft.sequence import DraftSequence, SequenceKey
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_pass import GrowingTrees, OpenSequence, PassRows
from shared.speculation.distributions import fresh_generator
from shared.tokens import TokenTree, TreeShape


@dataclass(frozen=True, slots=True)
class BranchRequest:
    """A verdict that is to get a branch.

    Attributes:
        verified: the tree that the verdict is on, and the shape of the branch's tree.
        accepted: tokens of the nodes that the verdict accepts.
        rows: rows of the tree that the verdict is on.
        parent: the branch with that tree; None where the target verifies the tree already.
    """

    verified: VerifiedTree
    verdict: LikelyVerdict
    accepted: Path
    rows: GrownRows
    parent: Branch | None

    @property
    def path(self) -> Path:
        """The tokens that the verdict commits."""
        return (*self.accepted, self.verdict.token)

    @property
    def key(self) -> SequenceKey:
        return self.verified.sequence.key


@dataclass(slots=True, eq=False)
class Branch:
    """The pages and the tree computed ahead for one verdict.

    Attributes:
        grown: rows of the branch's tree; None while the device computes them.
        children: branches for verdicts on the branch's tree, by the tokens that they commit.
    """

    request: BranchRequest
    kv: BranchKv
    grown: GrownRows | None = None
    children: dict[Path, Branch] = field(default_factory=dict)

    @property
    def rows(self) -> GrownRows:
        """Rows of the branch's tree, which must have grown."""
        assert self.grown is not None
        return self.grown


def with_descendants(branches: Iterable[Branch]) -> Iterator[Branch]:
    """Yields branches and all their descendants."""
    for branch in branches:
        yield branch
        yield from with_descendants(branch.children.values())


def num_choices(shape: TreeShape, budget: int) -> int:
    """Returns how many tokens to find after each node. They are more than its children, because the
    bonus token of a verdict is none of them.

    Args:
        budget: most verdicts to prepare for.
    """
    return max(shape.topk + 1, budget) if budget else 0


def grown_shape(shape: TreeShape, vocab_size: int) -> TreeShape:
    """Returns a shape without levels deeper than a chain of all its nodes, and without children
    beyond the vocabulary."""
    num_steps, topk = min(shape.num_steps, shape.max_node_count), min(shape.topk, vocab_size)
    if (num_steps, topk) == (shape.num_steps, shape.topk):
        return shape
    return replace(shape, num_steps=num_steps, topk=topk)


class PassTrees:
    """Grows trees after committed rows and in branches.

    Args:
        generator: random generator on the host, for chains drawn for targets that verify by the
            draft's distributions. Seeded by the system when left out.

    Attributes:
        max_sequences: most trees of one pass.
    """

    def __init__(
        self, grower: TreeGrower, contexts: Contexts, generator: torch.Generator | None = None
    ) -> None:
        self.max_sequences = grower.limits.max_sequences
        self._grower, self._split = grower, grower.split()
        self._contexts, self._generator = contexts, generator or fresh_generator()

    def shape(self, shape: TreeShape) -> TreeShape:
        """See `grown_shape`."""
        return grown_shape(shape, self._grower.model.vocab_size)

    def is_prepared(self, shape: TreeShape, num_sequences: int, budget: int) -> bool:
        """Whether all graphs exist for trees of a shape, for so many sequences with `budget`
        verdicts to prepare for each."""
        shape = self.shape(shape)
        return all(
            grower.is_ready(shape, count, num_choices=choices, is_walk=is_walk)
            for grower, count, choices, is_walk in self._uses(shape, num_sequences, budget)
        )

    def prepare(self, shape: TreeShape, num_sequences: int | None, budget: int) -> bool:
        """Captures one of these graphs, or with None one for any number of sequences; returns
        whether one was missing."""
        shape = self.shape(shape)
        return any(
            grower.capture_next(
                shape,
                num_choices=choices,
                is_walk=is_walk,
                num_sequences=None if num_sequences is None else count,
            )
            for grower, count, choices, is_walk in self._uses(shape, num_sequences or 1, budget)
        )

    def grow(
        self, sequences: Sequence[DraftSequence], shape: TreeShape, num_choices: int
    ) -> list[GrownRows]:
        """Computes the committed rows that are left of each sequence, and a tree after them.

        Args:
            sequences: sequences that `grows_whole`, complete, with pages for rows and tree.
            num_choices: see `TreeGrower.begin`.
        """
        return [
            grown
            for batch in self._batches(sequences)
            for grown in self._grow(batch, shape, num_choices)
        ]

    def grow_scored(
        self, sequences: Sequence[DraftSequence], shape: TreeShape
    ) -> Iterator[TokenTree]:
        """Yields a tree for each sequence that does not `grows_whole`, scored by all sampling
        parameters of its request; see `grow`."""
        for batch in self._batches(sequences):
            scores = request_scores(batch, shape, self._generator)
            grown = self._grow(batch, shape, 0, scores)
            yield from scores.finished([rows.tree for rows in grown])

    def can_walk(self, shape: TreeShape, num_sequences: int, num_choices: int) -> bool:
        """Whether a `walk` of so many trees has its graph."""
        return self._grower.is_ready(shape, num_sequences, num_choices=num_choices, is_walk=True)

    def walk(
        self,
        sequences: Sequence[DraftSequence],
        trees: Sequence[TokenTree],
        shape: TreeShape,
        num_choices: int,
    ) -> list[GrownRows]:
        """Computes the committed rows that are left of each sequence, and the nodes of a given tree
        after them. Only queues work on the device.

        Args:
            sequences: at most `max_sequences`; see `grow`.
            shape: see `TreeGrower.walk`.
        """
        # After a prompt, or a deeper tree of another draft, more rows are open than fit a pass.
        max_rows = self._grower.max_open_rows(shape)
        rows, sources = self._contexts.open_pass(sequences, max_rows)
        walked = self._grower.walk(rows, sources, trees, shape, num_choices=num_choices)
        for sequence in sequences:
            self._contexts.settle(sequence)
        return list(map(GrownRows, walked))

    def begin(
        self, requests: Sequence[BranchRequest], rows: Sequence[OpenSequence], budget: int
    ) -> GrowingTrees:
        """Begins to grow a tree in each branch, all of one shape, after the bonus token of its
        verdict. The pass can pause while other trees are grown; the next `begin` ends it."""
        self._contexts.apply_moves()
        shape = requests[0].verified.shape
        states, choices = list[Tensor](), num_choices(shape, budget)
        if not self._contexts.keeps_tree_rows:
            # The states of the accepted nodes stand in for features. Only the trees are kept, so
            # nothing continues from their rows.
            choices = 0
            states = PassRows.states(
                request.rows.pass_row(request.accepted) for request in requests
            )
        return self._split.begin(rows, states, shape, num_choices=choices)

    def _batches(self, sequences: Sequence[DraftSequence]) -> Iterator[Sequence[DraftSequence]]:
        """Yields the sequences in batches of one pass."""
        for start in range(0, len(sequences), self.max_sequences):
            yield sequences[start : start + self.max_sequences]

    def _uses(
        self, shape: TreeShape, num_sequences: int, budget: int
    ) -> list[tuple[TreeGrower, int, int, bool]]:
        """Returns the kinds of passes in use: the grower, the number of trees, the number of tokens
        to find after each row, and whether trees are walked."""
        choices, num_branches = num_choices(shape, budget), num_sequences * budget
        grown = self._grower, num_sequences, choices, False
        if not budget:
            return [grown]
        if self._contexts.keeps_tree_rows:
            return [grown, (self._split, num_branches, choices, False)]
        walked = self._grower, num_sequences, choices, True
        return [grown, walked, (self._split, num_branches, 0, False)]

    def _grow(
        self,
        sequences: Sequence[DraftSequence],
        shape: TreeShape,
        num_choices: int,
        scores: DraftScores | None = None,
    ) -> list[GrownRows]:
        # After a prompt, or a deeper tree of another draft, more rows are open than fit a pass.
        max_rows = self._grower.max_open_rows(shape)
        rows, sources = self._contexts.open_pass(sequences, max_rows)
        growing = self._grower.begin(rows, sources, shape, num_choices=num_choices, scores=scores)
        growing.queue()
        # The device computes meanwhile.
        for sequence in sequences:
            self._contexts.settle(sequence)
        grown = list(map(GrownRows, growing.read()))
        for sequence, rows_of_tree in zip(sequences, grown, strict=True):
            self._contexts.set_subtree(sequence, rows_of_tree)
        return grown
