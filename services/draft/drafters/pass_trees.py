"""Trees that grow in passes of the device, with one copy to the host: behind committed tokens, and
in branches, which are computed for verdicts that may fall."""

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
from shared.speculation.noise import fresh_generator
from shared.tokens import TokenTree, TreeShape


@dataclass(frozen=True, slots=True)
class Wanted:
    """A verdict that gets a branch.

    Attributes:
        verified: the tree that it is on, and the shape of the branch's.
        accepted: tokens of the nodes that it accepts.
        rows: of the tree that it is on.
        behind: the branch with that tree; None where the target verifies it already.
    """

    verified: VerifiedTree
    verdict: LikelyVerdict
    accepted: Path
    rows: GrownRows
    behind: Branch | None

    @property
    def path(self) -> Path:
        """The tokens that the verdict commits."""
        return (*self.accepted, self.verdict.token)

    @property
    def key(self) -> SequenceKey:
        return self.verified.sequence.key


@dataclass(slots=True, eq=False)
class Branch:
    """The rows computed ahead for one verdict.

    Attributes:
        grown: its tree's; None while the device is at work on it.
        followers: by the tokens that it commits, what is computed for a verdict on its tree.
    """

    wanted: Wanted
    kv: BranchKv
    grown: GrownRows | None = None
    followers: dict[Path, Branch] = field(default_factory=dict)

    @property
    def rows(self) -> GrownRows:
        """Those that have grown."""
        assert self.grown is not None
        return self.grown


class WantedBranches:
    """Verdicts that get a branch when their turn comes, sequence by sequence."""

    def __init__(self) -> None:
        self._by_key: dict[SequenceKey, list[Wanted]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def want(self, key: SequenceKey, wanted: list[Wanted]) -> None:
        """Takes those of a sequence in place of any before."""
        self._by_key[key] = wanted

    def drop(self, key: SequenceKey) -> None:
        self._by_key.pop(key, None)

    def clear(self) -> None:
        self._by_key.clear()

    def take(self, count: int) -> list[Wanted]:
        """Takes verdicts whose trees have one shape, as many as a pass grows."""
        batch: list[Wanted] = []
        for key, wanted in list(self._by_key.items()):
            room = count - len(batch)
            if batch and wanted and wanted[0].verified.shape != batch[0].verified.shape:
                continue
            batch += wanted[:room]
            if len(wanted) > room:
                self._by_key[key] = wanted[room:]
                break
            del self._by_key[key]
        return batch


def all_of(branches: Iterable[Branch]) -> Iterator[Branch]:
    """Yields branches and what follows them."""
    for branch in branches:
        yield branch
        yield from all_of(branch.followers.values())


def num_choices(shape: TreeShape, budget: int) -> int:
    """Returns how many tokens to find after each node: a verdict ends in one that its tree does not
    hold.

    Args:
        budget: verdicts to choose.
    """
    return max(shape.topk + 1, budget) if budget else 0


def grown_shape(shape: TreeShape, vocab_size: int) -> TreeShape:
    """Returns a shape without useless parts: levels beyond the last kept node of a
    chain, and children beyond the vocabulary."""
    num_steps, topk = min(shape.num_steps, shape.max_node_count), min(shape.topk, vocab_size)
    if (num_steps, topk) == (shape.num_steps, shape.topk):
        return shape
    return replace(shape, num_steps=num_steps, topk=topk)


class PassTrees:
    """Grows trees behind committed rows and in branches.

    Args:
        generator: of the host; the source of what is drawn for targets that verify by the draft's
            distributions. Seeded by the system when left out.
    """

    def __init__(
        self, grower: TreeGrower, contexts: Contexts, generator: torch.Generator | None = None
    ) -> None:
        self._grower, self._split = grower, grower.split()
        self._contexts, self._generator = contexts, generator or fresh_generator()

    @property
    def max_sequences(self) -> int:
        """Trees of one pass."""
        return self._grower.limits.max_sequences

    def shape(self, shape: TreeShape) -> TreeShape:
        """See `grown_shape`."""
        return grown_shape(shape, self._grower.model.vocab_size)

    def is_prepared(self, shape: TreeShape, num_sequences: int, budget: int) -> bool:
        """Whether all graphs are there for trees of a shape, of so many sequences that prepare for
        so many verdicts each."""
        return all(
            grower.is_ready(shape, count, num_choices=choices, is_walk=is_walk)
            for grower, count, choices, is_walk in self._uses(shape, num_sequences, budget)
        )

    def prepare(self, shape: TreeShape, num_sequences: int | None, budget: int) -> bool:
        """Captures one of them, or one for any number of sequences; returns whether one was
        left."""
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
        """Computes the committed rows that are left of each sequence, and a tree behind them.

        Args:
            sequences: that `grows_whole`, complete, with room for both.
            num_choices: see `TreeGrower.begin`.
        """
        return [
            each
            for batch in self._batches(sequences)
            for each in self._grow(batch, shape, num_choices)
        ]

    def grow_scored(
        self, sequences: Sequence[DraftSequence], shape: TreeShape
    ) -> Iterator[TokenTree]:
        """Yields a tree for each sequence that does not grow whole, by all that its request asks
        for; see `grow`."""
        for batch in self._batches(sequences):
            scores = request_scores(batch, shape, self._generator)
            grown = self._grow(batch, shape, 0, scores)
            yield from scores.finished([each.tree for each in grown])

    def can_walk(self, shape: TreeShape, num_sequences: int, num_choices: int) -> bool:
        """Whether a `walk` of so many trees waits for no graph."""
        return self._grower.is_ready(shape, num_sequences, num_choices=num_choices, is_walk=True)

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
        rows, sources = self._open(sequences, shape)
        walked = self._grower.walk(rows, sources, trees, shape, num_choices=num_choices)
        self._settle(sequences)
        return list(map(GrownRows, walked))

    def num_branch_rows(self, shape: TreeShape) -> int:
        """Returns the rows of a tree that are computed in a branch: where none is kept, nothing is
        chosen behind the leaves."""
        num_levels = shape.num_steps if self._contexts.keeps_tree_rows else shape.num_steps - 1
        return num_levels * shape.topk

    def begin(
        self, wanted: Sequence[Wanted], rows: Sequence[OpenSequence], num_choices: int
    ) -> GrowingTrees:
        """Begins to grow a tree of one shape in each branch, behind the token that ends its
        verdict. The pass can stop while other trees are grown; the next one gives it up."""
        self._contexts.move()
        states: Sequence[Tensor] = ()
        if not self._contexts.keeps_tree_rows:
            # The states of accepted nodes stand in for features.
            states = PassRows.states(each.rows.row(each.accepted) for each in wanted)
        return self._split.begin(rows, states, wanted[0].verified.shape, num_choices=num_choices)

    def _batches(self, sequences: Sequence[DraftSequence]) -> Iterator[Sequence[DraftSequence]]:
        """Yields the sequences, as many at a time as a pass takes."""
        for start in range(0, len(sequences), self.max_sequences):
            yield sequences[start : start + self.max_sequences]

    def _uses(
        self, shape: TreeShape, num_sequences: int, budget: int
    ) -> list[tuple[TreeGrower, int, int, bool]]:
        """Returns what passes are used for: the trees at a time, the tokens to find after each row,
        and whether trees are walked."""
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
        rows, sources = self._open(sequences, shape)
        growing = self._grower.begin(rows, sources, shape, num_choices=num_choices, scores=scores)
        growing.queue()
        # The device computes meanwhile.
        self._settle(sequences)
        grown = list(map(GrownRows, growing.read()))
        for sequence, each in zip(sequences, grown, strict=True):
            self._contexts.plant(sequence, each)
        return grown

    def _open(
        self, sequences: Sequence[DraftSequence], shape: TreeShape
    ) -> tuple[list[OpenSequence], list[Tensor]]:
        # After a prompt, or a deeper tree of another draft, there is more than a pass can take.
        return self._contexts.open_pass(sequences, self._grower.max_open_rows(shape))

    def _settle(self, sequences: Sequence[DraftSequence]) -> None:
        for sequence in sequences:
            self._contexts.settle(sequence)
