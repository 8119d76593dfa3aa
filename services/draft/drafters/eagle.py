"""Drafts with a one-layer head that continues the target's hidden states: EAGLE-2 and EAGLE-3.

Sequences whose features have not arrived get an empty tree: their target need not wait.

Drafting ahead, the states of the verified tree's nodes stand in for the features that its verdict
will bring. They are computed again from the features of each verdict, so that errors do not grow
from round to round: nothing that was prepared for a verdict is gone on from but its tree. Once that
is verified, a *walk* computes the committed rows and then the nodes of this very tree behind them,
and finds what may follow each. The likeliest verdicts on it get branches, see `BranchPasses`, in
which the bonus token is computed from the state of the last accepted node and a tree is grown from
it, which is all that is kept.

A verdict that falls while its tree is about to be there gets it late; with another one the features
are here as soon as that tree would be, and make a better one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from services.draft.drafters.branch_drafter import BranchLookahead, TreeDrafter, branch_proposal
from services.draft.drafters.contexts import GrownRows
from services.draft.drafters.drafter import Proposal, VerifiedTree
from services.draft.drafters.head_contexts import HeadContexts
from services.draft.drafters.pass_trees import Branch, PassTrees, num_choices
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.leases import KvLeases
from shared.models.heads.head import DraftHead
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import HeadModel
from shared.runtime.tree_pass import walked_shape
from shared.tokens import TreeShape, Verdict


@dataclass(frozen=True, slots=True)
class _Walk:
    """A tree that is verified, and was grown before the features were here.

    Attributes:
        shape: see `walked_shape`.
    """

    verified: VerifiedTree
    shape: TreeShape


class HeadBranches(BranchLookahead):
    """Walks the tree that is verified, and keeps nothing of branches but their trees."""

    _contexts: HeadContexts

    def __init__(self, trees: PassTrees, contexts: HeadContexts) -> None:
        super().__init__(trees, contexts)
        self._walks: dict[SequenceKey, _Walk] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._walks) or not self._passes.is_idle

    def begin(self, verified: VerifiedTree) -> None:
        if not verified.sequence.grows_whole:
            return
        key, shape = verified.sequence.key, self._trees.shape(verified.shape)
        verified, rows = replace(verified, shape=shape), self._rows.get(key)
        if rows is not None:
            self._want(verified, rows)
        else:
            self._walks[key] = _Walk(verified, walked_shape(verified.tree, shape))

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        key, path = sequence.key, tuple(token_ids)
        rows, under_way = self._rows.get(key), self._passes.under_way
        growing = None
        if rows is not None and under_way is not None and under_way.trees.is_half_done:
            growing = self._passes.growing(rows, path)
        # Without a budget no pass finds what may follow a node, so there is nothing to learn from.
        if self._budget and rows is not None:
            self._observe(rows, path)
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
            del self._walks[each.verified.sequence.key]
        choices = num_choices(shape, self.budget)
        # A tree larger than those wanted now may call for a shape that nobody has prepared for: its
        # graph takes longer to capture than the round that the walk is for.
        is_quick = self._trees.can_walk(shape, len(due), choices)
        due = [each for each in due if is_quick or each.shape == each.verified.shape]
        walks = [each.verified for each in due if self._can_walk(each)]
        if not walks:
            return
        sequences, trees = [each.sequence for each in walks], [each.tree for each in walks]
        walked = self._trees.walk(sequences, trees, shape, choices)
        for verified, rows in zip(walks, walked, strict=True):
            self._rows[verified.sequence.key] = rows
            self._want(verified, rows)

    def _can_walk(self, walk: _Walk) -> bool:
        """Whether the features are here, and there is memory."""
        sequence, num_rows = walk.verified.sequence, walk.shape.num_steps * walk.shape.topk
        contexts = self._contexts
        return contexts.is_complete(sequence) and contexts.reserve(sequence, num_rows)

    def _want(self, verified: VerifiedTree, rows: GrownRows) -> None:
        wanted = self._likely(verified, rows)
        if wanted:
            self._passes.wanted.want(verified.sequence.key, wanted)

    def _take(self, branch: Branch) -> Proposal | None:
        key = branch.wanted.key
        self._passes.free(branch)
        if self._fallen.get(key) is branch:
            del self._fallen[key]
            return branch_proposal(branch, is_current=True)
        is_next = self._rows.get(key) is branch.wanted.rows
        return branch_proposal(branch, is_current=False) if is_next else None


class EagleDrafter(TreeDrafter):
    """See `TreeDrafter`. Whatever sets the heads apart is in `DraftHead`."""

    _contexts: HeadContexts
    _model: HeadModel

    def __init__(
        self,
        model: HeadModel,
        leases: KvLeases,
        *,
        max_context_tokens: int,
        keeps_features: bool,
        grower: TreeGrower | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Args:
        keeps_features: see `HeadContexts`.
        grower: of the model; None for heads of several layers.
        generator: see `PassTrees`.
        """
        contexts = HeadContexts(
            model,
            leases,
            max_context_tokens=max_context_tokens,
            keeps_features=keeps_features,
            min_rows=len(model.head.layers),
        )
        branches = None
        if grower is not None:
            branches = HeadBranches(PassTrees(grower, contexts, generator), contexts)
        super().__init__(model, contexts, branches, max_context_tokens=max_context_tokens)

    @property
    def head(self) -> DraftHead:
        """The weights, which others may copy into between two forwards."""
        return self._model.head

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        if features is not None:
            self.add_features(sequence, features)
        if self._branches is not None:
            self._branches.commit(sequence, verdict.committed_token_ids)
        if self._contexts.slide(sequence):
            # A pass under way reads pages of the old window, which others may have from now on.
            self._drop_ahead(sequence)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        has_started_over = self._contexts.add_features(sequence, rows)
        if has_started_over:
            self._drop_ahead(sequence)
