"""Drafts ahead with a head in passes of the device.

A verdict brings the features of what it commits, and a head's rows are best computed from those. So
nothing that was prepared for a verdict is gone on from but its tree: once that is verified, a
*walk* computes the committed rows and then the nodes of this very tree behind them, and finds what
may follow each. The likeliest verdicts on it get branches, see `BranchPasses`: pages with the rows
of the nodes that the verdict would accept, in which the bonus token is computed from the state of
the last of them, and a tree is grown from it. The trees are all that is kept of them.

A verdict that falls while its tree is about to be there gets it late; with another one the features
are here as soon as that tree would be, and make a better one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.draft.drafters.branch_drafter import BranchPass, BranchPasses
from services.draft.drafters.branches import (
    GrowingBranch,
    GrownRows,
    LikelyBranches,
    Path,
    Plan,
    Wanted,
    num_choices,
)
from services.draft.drafters.drafter import Proposal
from services.draft.drafters.head_contexts import HeadContexts
from services.draft.drafters.whole_trees import PassGraphs, PassUse, batches, grown_shape
from services.draft.likely_verdicts import FanOut
from services.draft.sequence import DraftSequence, SequenceKey
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_pass import GrowingTrees, OpenSequence, PassRows, walked_shape
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


@dataclass(frozen=True, slots=True)
class _Walk:
    """A tree that is verified, and was grown before the features were here.

    Attributes:
        shape: see `walked_shape`.
    """

    plan: Plan
    tree: TokenTree
    shape: TreeShape


class HeadBranches:
    """See `Lookahead`. For sequences that `grows_whole`."""

    def __init__(self, trees: HeadTrees, contexts: HeadContexts, *, vocab_size: int) -> None:
        """`vocab_size` is the head's own."""
        self._budget = 0
        self._trees, self._contexts, self._vocab_size = trees, contexts, vocab_size
        self._likely = LikelyBranches()
        self.graphs = PassGraphs(trees.uses, lambda: self.budget, vocab_size=vocab_size)
        self._passes = BranchPasses(
            trees, contexts, num_choices=lambda _: 0, make_room=lambda: False
        )
        self._walks: dict[SequenceKey, _Walk] = {}
        # Of the trees that are verified, as far as they are computed.
        self._rows: dict[SequenceKey, GrownRows] = {}
        self._fallen: dict[SequenceKey, GrowingBranch] = {}

    @property
    def budget(self) -> int:
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget
        if not budget:
            # Nobody asks for what grows: trees of current rounds begin anew.
            self._fallen.clear()
            self._walks.clear()

    @property
    def has_work(self) -> bool:
        return bool(self._walks) or not self._passes.is_idle

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Grows trees for the current round behind reserved sequences.

        Args:
            sequences: with features of every row.
            shape: see `grown_shape`.
        """
        for sequence in sequences:
            self.drop(sequence)
        grown = self._trees.grow(sequences, shape, num_choices(shape, self.budget))
        pairs = list(zip(sequences, grown, strict=True))
        self._rows.update((sequence.key, rows) for sequence, rows in pairs)
        return [Proposal(sequence, rows.tree) for sequence, rows in pairs]

    def begin(
        self, sequence: DraftSequence, tree: TokenTree, shape: TreeShape, fan_out: FanOut
    ) -> None:
        key = sequence.key
        plan = Plan(sequence, grown_shape(shape, self._vocab_size), fan_out)
        rows = self._rows.get(key)
        if rows is not None:
            self._want(plan, tree, rows)
        else:
            self._walks[key] = _Walk(plan, tree, walked_shape(tree, plan.shape))

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """The tree may be among those that grow; there is nothing else to go on from."""
        return sequence.key in self._fallen

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Takes a verdict and drops the branches prepared for others.

        Args:
            token_ids: what it commits.
        """
        key, path = sequence.key, tuple(token_ids)
        growing = self._growing(key, path)
        # Without a budget no pass finds what may follow a node, so there is nothing to learn from.
        if self._budget and key in self._rows:
            self._likely.observe(self._rows[key], path)
        self.drop(sequence)
        if growing is not None:
            self._fallen[key] = growing

    def drop(self, sequence: DraftSequence) -> None:
        """Forgets a sequence; its branches are freed when their pass ends."""
        self._passes.wanted.drop(sequence.key)
        for kept in (self._walks, self._rows, self._fallen):
            kept.pop(sequence.key, None)

    def make_room(self) -> bool:
        """Gives up all branches because memory is short, but for those of a pass that a current
        round waits for; returns whether there were any."""
        if self._fallen or self._passes.under_way is None:
            return False
        self._passes.give_up()
        self._passes.wanted.clear()
        return True

    def advance(self) -> list[Proposal]:
        """Queues walks and a forward of a pass, or takes what the last one has grown."""
        if self._walks:
            self._walk()
        taken = [self._take(*each) for each in self._passes.advance(self._is_of_use)]
        return [proposal for proposal in taken if proposal is not None]

    def _walk(self) -> None:
        """Walks trees that go into one pass, and wants the verdicts on them. Waits for the device
        to find what may follow their nodes."""
        shape = next(iter(self._walks.values())).shape
        due = [each for each in self._walks.values() if each.shape == shape]
        due = due[: self._trees.max_sequences]
        for each in due:
            del self._walks[each.plan.sequence.key]
        choices = num_choices(shape, self.budget)
        # A tree larger than those wanted now may call for a shape that nobody has prepared for: its
        # graph takes longer to capture than the round that the walk is for.
        is_quick = self._trees.can_walk(shape, len(due), choices)
        due = [each for each in due if is_quick or each.shape == each.plan.shape]
        walks = [each for each in due if self._can_walk(each)]
        if not walks:
            return
        sequences, trees = [each.plan.sequence for each in walks], [each.tree for each in walks]
        walked = self._trees.walk(sequences, trees, shape, choices)
        for each, rows in zip(walks, walked, strict=True):
            self._rows[each.plan.sequence.key] = rows
            self._want(each.plan, each.tree, rows)

    def _can_walk(self, walk: _Walk) -> bool:
        """Whether the features are here, and there is memory."""
        sequence, num_rows = walk.plan.sequence, walk.shape.num_steps * walk.shape.topk
        contexts = self._contexts
        return contexts.is_complete(sequence) and contexts.reserve(sequence, num_rows)

    def _want(self, plan: Plan, tree: TokenTree, rows: GrownRows) -> None:
        wanted = self._likely.wanted(plan, tree, rows, None)
        if wanted:
            self._passes.wanted.want(plan.sequence.key, wanted)

    def _is_of_use(self, growing: BranchPass) -> bool:
        return any(map(self._may_fall, growing.branches))

    def _may_fall(self, growing: GrowingBranch) -> bool:
        """Whether the verdict of a branch has fallen last, or may be the next."""
        wanted = growing.wanted
        key = wanted.plan.sequence.key
        return self._rows.get(key) is wanted.rows or self._fallen.get(key) is growing

    def _growing(self, key: SequenceKey, path: Path) -> GrowingBranch | None:
        """Returns the branch of a verdict if its tree is about to be there."""
        rows, under_way = self._rows.get(key), self._passes.under_way
        if rows is None or under_way is None or not under_way.trees.is_half_done:
            return None
        behind = self._passes.growing_behind(rows)
        return next((each for each in behind if each.wanted.path == path), None)

    def _take(self, growing: GrowingBranch, rows: GrownRows) -> Proposal | None:
        """Frees a branch that has grown; returns its tree if it is asked for."""
        wanted, shape = growing.wanted, growing.wanted.plan.shape
        sequence, key = wanted.plan.sequence, wanted.plan.sequence.key
        self._passes.free(growing.kv, rows)
        if self._fallen.get(key) is growing:
            del self._fallen[key]
            return Proposal(sequence, rows.tree, shape=shape)
        if self._rows.get(key) is wanted.rows:
            return Proposal(sequence, rows.tree, wanted.verdict.condition, shape)
        return None
