"""Drafts with a one-layer head that continues the target's hidden states: EAGLE-2 and EAGLE-3.

A sequence whose features have not arrived gets an empty tree, so that its target does not wait.

When drafting ahead, the head's states of the verified tree's nodes stand in for the features that
come with the verdict. After each verdict the committed rows are computed again from its features,
so that errors do not grow from round to round: of a branch only its tree is kept. While the target
verifies that tree, a *walk* computes the committed rows and then the tree's nodes after them, and
finds the continuations of each node. The likeliest verdicts on the tree get branches, see
`BranchPasses`. In a branch the bonus token is computed from the state of the last accepted node,
and a tree is grown from it.

If a verdict arrives when its branch is at least half done, the branch's tree is finished and sent
late. Otherwise a new tree is grown from the verdict's features: they are here as soon as the
branch's tree would be, and make a better tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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


class HeadBranches(BranchLookahead):
    """Walks the tree that is verified, and keeps only the trees of branches, not their rows."""

    _contexts: HeadContexts

    def __init__(self, trees: PassTrees, contexts: HeadContexts) -> None:
        super().__init__(trees, contexts)
        # Trees under verification that were grown before their sequences' features arrived, and
        # the shape of each by `walked_shape`.
        self._walks: dict[SequenceKey, tuple[VerifiedTree, TreeShape]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._walks) or not self._passes.is_idle

    def begin(self, verified: VerifiedTree) -> None:
        if not verified.sequence.grows_whole:
            return
        key, shape = verified.sequence.key, self.trees.shape(verified.shape)
        verified, rows = replace(verified, shape=shape), self._rows.get(key)
        if rows is not None:
            self._request_branches(verified, rows)
        else:
            self._walks[key] = verified, walked_shape(verified.tree, shape)

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        key, path = sequence.key, tuple(token_ids)
        rows, under_way = self._rows.get(key), self._passes.under_way
        growing = None
        if rows is not None and under_way is not None and under_way.trees.is_half_done:
            growing = self._passes.growing_branch(rows, path)
        # Without a budget no pass finds continuations, so there are no ranks to count.
        if self.budget and rows is not None:
            self._observe(rows, path)
        self.drop(sequence)
        if growing is not None:
            self._decided[key] = growing

    def drop(self, sequence: DraftSequence) -> None:
        self._passes.queue.pop(sequence.key, None)
        for state in (self._walks, self._rows, self._decided):
            state.pop(sequence.key, None)

    def make_room(self) -> bool:
        if self._decided or self._passes.under_way is None:
            return False
        self._passes.give_up()
        self._passes.queue.clear()
        return True

    def advance(self) -> list[Proposal]:
        """Queues walks as well."""
        if self._walks:
            self._walk()
        return super().advance()

    def _give_up(self) -> None:
        self._decided.clear()
        self._walks.clear()

    def _walk(self) -> None:
        """Walks as many trees as fit one pass, and requests branches for the verdicts on them.
        Waits for the device to find the continuations of their nodes."""
        _, shape = next(iter(self._walks.values()))
        due = [verified for verified, walked in self._walks.values() if walked == shape]
        due = due[: self.trees.max_sequences]
        for verified in due:
            del self._walks[verified.sequence.key]
        choices = num_choices(shape, self.budget)
        # A tree larger than the requested shape may need a walk of a shape without a graph.
        # Capturing that takes longer than the round that the walk is for.
        has_graph = self.trees.can_walk(shape, len(due), choices)
        contexts, num_rows = self._contexts, shape.num_steps * shape.topk
        walks = [
            verified
            for verified in due
            if (has_graph or verified.shape == shape)
            and contexts.is_complete(verified.sequence)
            and contexts.reserve(verified.sequence, num_rows)
        ]
        if not walks:
            return
        sequences, trees = [walk.sequence for walk in walks], [walk.tree for walk in walks]
        walked = self.trees.walk(sequences, trees, shape, choices)
        for verified, rows in zip(walks, walked, strict=True):
            self._rows[verified.sequence.key] = rows
            self._request_branches(verified, rows)

    def _request_branches(self, verified: VerifiedTree, rows: GrownRows) -> None:
        requests = self._likely_requests(verified, rows)
        if requests:
            self._passes.queue[verified.sequence.key] = requests

    def _collect(self, branch: Branch) -> Proposal | None:
        key = branch.request.key
        self._passes.free(branch)
        if self._decided.get(key) is branch:
            del self._decided[key]
            return branch_proposal(branch, is_current=True)
        is_next = self._rows.get(key) is branch.request.rows
        return branch_proposal(branch, is_current=False) if is_next else None


class EagleDrafter(TreeDrafter):
    """Drafts with a head; see `TreeDrafter`. `DraftHead` hides the differences between heads."""

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
        grower: for the model; None for heads of several layers.
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
        """The head; its weights may be overwritten between two forwards."""
        return self._model.head

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        if features is not None:
            self.add_features(sequence, features)
        if self._branches is not None:
            self._branches.commit(sequence, verdict.committed_token_ids)
        if self._contexts.slide(sequence):
            # A pass under way reads pages of the old window, which are free from now on.
            self._drop_ahead(sequence)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        has_restarted = self._contexts.add_features(sequence, rows)
        if has_restarted:
            self._drop_ahead(sequence)
