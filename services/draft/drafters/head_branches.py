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

from services.draft.drafters.branch_drafter import BranchLookahead
from services.draft.drafters.branches import GrowingBranch, GrownRows, Plan, num_choices
from services.draft.drafters.drafter import Proposal
from services.draft.drafters.head_contexts import HeadContexts
from services.draft.drafters.pass_trees import PassTrees
from services.draft.drafters.tails import Path
from services.draft.drafters.whole_trees import grown_shape, grows_whole
from services.draft.likely_verdicts import FanOut
from services.draft.sequence import DraftSequence, SequenceKey
from shared.runtime.tree_pass import walked_shape
from shared.tokens import TokenTree, TreeShape


@dataclass(frozen=True, slots=True)
class _Walk:
    """A tree that is verified, and was grown before the features were here.

    Attributes:
        shape: see `walked_shape`.
    """

    plan: Plan
    tree: TokenTree
    shape: TreeShape


class HeadBranches(BranchLookahead):
    """Walks the tree that is verified, and keeps nothing of branches but their trees."""

    _contexts: HeadContexts

    def __init__(self, trees: PassTrees, contexts: HeadContexts, *, vocab_size: int) -> None:
        super().__init__(trees, contexts, vocab_size=vocab_size)
        self._walks: dict[SequenceKey, _Walk] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._walks) or not self._passes.is_idle

    def begin(
        self, sequence: DraftSequence, tree: TokenTree, shape: TreeShape, fan_out: FanOut
    ) -> None:
        if not grows_whole(sequence):
            return
        key = sequence.key
        plan = Plan(sequence, grown_shape(shape, self._vocab_size), fan_out)
        rows = self._rows.get(key)
        if rows is not None:
            self._want(plan, tree, rows)
        else:
            self._walks[key] = _Walk(plan, tree, walked_shape(tree, plan.shape))

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        key, path = sequence.key, tuple(token_ids)
        growing = self._growing(key, path)
        # Without a budget no pass finds what may follow a node, so there is nothing to learn from.
        if self._budget and key in self._rows:
            self._likely.observe(self._rows[key], path)
        self.drop(sequence)
        if growing is not None:
            self._fallen[key] = growing

    def drop(self, sequence: DraftSequence) -> None:
        self._passes.wanted.drop(sequence.key)
        for kept in (self._walks, self._rows, self._fallen):
            kept.pop(sequence.key, None)

    def make_room(self) -> bool:
        if self._fallen or self._passes.under_way is None:
            return False
        self._passes.give_up()
        self._passes.wanted.clear()
        return True

    def advance(self) -> list[Proposal]:
        """Queues walks as well."""
        if self._walks:
            self._walk()
        return super().advance()

    def _give_up(self) -> None:
        self._fallen.clear()
        self._walks.clear()

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

    def _growing(self, key: SequenceKey, path: Path) -> GrowingBranch | None:
        """Returns the branch of a verdict if its tree is about to be there."""
        rows, under_way = self._rows.get(key), self._passes.under_way
        if rows is None or under_way is None or not under_way.trees.is_half_done:
            return None
        behind = self._passes.growing_behind(rows)
        return next((each for each in behind if each.wanted.path == path), None)

    def _take(self, growing: GrowingBranch, rows: GrownRows) -> Proposal | None:
        wanted, shape = growing.wanted, growing.wanted.plan.shape
        sequence, key = wanted.plan.sequence, wanted.plan.sequence.key
        self._passes.free(growing.kv, rows)
        if self._fallen.get(key) is growing:
            del self._fallen[key]
            return Proposal(sequence, rows.tree, shape=shape)
        if self._rows.get(key) is wanted.rows:
            return Proposal(sequence, rows.tree, wanted.verdict.condition, shape)
        return None
