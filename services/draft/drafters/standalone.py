"""Drafts with a smaller language model that has its own paged KV and prefix cache.

KV of the accepted path is kept: a chain's is in place already, a tree's is moved to the front of
its tail. What is drafted ahead is in pages of its own, see `branch_drafter`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from services.draft.drafters.branch_drafter import (
    BranchLookahead,
    BranchPass,
    TreeDrafter,
    branch_proposal,
)
from services.draft.drafters.contexts import BranchKv, Contexts, GrownRows, Path
from services.draft.drafters.drafter import Proposal, VerifiedTree
from services.draft.drafters.pass_trees import (
    Branch,
    PassTrees,
    all_of,
    num_choices,
)
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey, drop_unknown_tokens
from shared.kv.batch import build_batch
from shared.kv.leases import KvLeases
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import DecoderModel
from shared.runtime.tree_pass import OpenSequence
from shared.tokens import TreeShape, Verdict


class StandaloneContexts(Contexts):
    """The row of a position reads the token there, so what a tree computed of it stays good."""

    reads_ahead = 0
    keeps_tree_rows = True

    def __init__(self, runner: ModelRunner, leases: KvLeases, *, max_context_tokens: int) -> None:
        super().__init__(runner.pool, leases, max_context_tokens=max_context_tokens)
        self._runner = runner

    def commit(self, sequence: DraftSequence) -> None:
        """Takes new tokens in; keeps the KV of those the last tree foresaw."""
        self._keep_accepted(sequence)
        self._slide(sequence)

    def adopt(self, sequence: DraftSequence, branch: BranchKv, rows: GrownRows) -> None:
        """Goes on in a branch where all committed tokens are computed.

        Args:
            rows: computed behind them in the branch.
        """
        kv = self.kv_of(sequence)
        self.leases.adopt(kv.lease, branch.own)
        kv.num_computed, kv.tail = self.num_window_rows(sequence), None
        self._slide(sequence)
        if not self.backlog(sequence):
            self.plant(sequence, rows)

    def backlog(self, sequence: DraftSequence) -> int:
        return self.num_window_rows(sequence) - self.kv_of(sequence).num_computed

    def is_complete(self, sequence: DraftSequence) -> bool:
        return True

    def branch(
        self, sequence: DraftSequence, behind: BranchKv | None, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        """See `Contexts.branch`; None also where there is no tail any more."""
        if behind is None and self.kv_of(sequence).tail is None:
            return None
        return super().branch(sequence, behind, path, num_rows)

    def take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        runner, rows = self._runner, [self._next_rows(*each) for each in counts]
        self.move()
        runner.run(build_batch(rows, page_size=runner.page_size, device=runner.device))

    def _open_sequence(self, sequence: DraftSequence) -> OpenSequence:
        if not self.backlog(sequence):
            # The last token was computed ahead, but its logits are gone.
            self.kv_of(sequence).num_computed -= 1
        return super()._open_sequence(sequence)

    def _keys(self, sequence: DraftSequence, window_start: int, count: int) -> Sequence[int]:
        return sequence.token_ids[window_start : window_start + count]

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        self._runner.move(moves)

    def _slide(self, sequence: DraftSequence) -> None:
        if self._is_outgrown(sequence):
            self._restart(sequence, sequence.num_tokens - self.num_kept_rows)

    def _keep_accepted(self, sequence: DraftSequence) -> None:
        """The tokens decide, not the verdict's node indices: the verified tree may have been
        another one, and KV depends on nothing but the tokens before it."""
        kv = self.kv_of(sequence)
        tail, kv.tail = kv.tail, None
        if tail is None:
            return
        base, pages = kv.num_computed, kv.lease.pages
        rows = tail.matched(sequence.token_ids[kv.window_start + base :])
        moved = [(row, place) for place, row in enumerate(rows) if row != place]
        sources, targets = [base + row for row, _ in moved], [base + place for _, place in moved]
        self._copy(pages, sources, pages, targets)
        kv.num_computed += len(rows)


LEAST_FOLLOWED = 0.25
"""Probability of a verdict from which on it pays to prepare for those on its tree: if another one
falls, the pass under way delays what it calls for by a forward."""


class BranchDrafter(BranchLookahead):
    """Goes on in a branch whose verdict falls, and prepares for the verdicts on its tree."""

    _contexts: StandaloneContexts

    def __init__(self, trees: PassTrees, contexts: StandaloneContexts) -> None:
        super().__init__(trees, contexts)
        self._branches: dict[SequenceKey, dict[Path, Branch]] = {}
        # Whose likeliest branch may be followed, and trees that are there before their round.
        self._to_follow: dict[SequenceKey, VerifiedTree] = {}
        self._ready: list[Proposal] = []

    @property
    def has_work(self) -> bool:
        return bool(self._to_follow or self._ready) or not self._passes.is_idle

    def begin(self, verified: VerifiedTree) -> None:
        key = verified.sequence.key
        rows = self._rows.get(key)
        if rows is None:
            return
        verified = replace(verified, shape=self._trees.shape(verified.shape))
        followers = self._branches.get(key, {})
        if followers:
            self._ready += [branch_proposal(each, is_current=False) for each in followers.values()]
            self._to_follow[key] = verified
        paths = {*followers, *(each.wanted.path for each in self._passes.growing_behind(rows))}
        if 2 * len(paths) < verified.budget:
            wanted = self._likely(verified, rows)
            self._passes.wanted.want(key, [each for each in wanted if each.path not in paths])

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        key, path = sequence.key, tuple(token_ids)
        rows = self._rows.get(key)
        if rows is not None:
            self._observe(rows, path)
        branch = self._branches.get(key, {}).pop(path, None)
        growing = None if rows is None else self._passes.growing(rows, path)
        self.drop(sequence)
        if branch is not None:
            self._adopt(sequence, branch)
        elif growing is not None:
            self._fallen[key] = growing
        else:
            self._contexts.commit(sequence)

    def drop(self, sequence: DraftSequence) -> None:
        key = sequence.key
        self._passes.wanted.drop(key)
        self._passes.leave_pages(self._rows.pop(key, None))
        self._fallen.pop(key, None)
        self._to_follow.pop(key, None)
        self._ready = [each for each in self._ready if each.sequence is not sequence]
        self._free(self._branches.pop(key, {}).values())

    def make_room(self) -> bool:
        under_way = None if self._fallen else self._passes.under_way
        if under_way is not None:
            if under_way.is_grown:
                # A sequence may have gone on in what is grown, and counts on the leaves.
                under_way.trees.queue()
            self._passes.give_up()
        held = [branches for branches in self._branches.values() if branches]
        for branches in held:
            self._free(branches.values())
        for kept in (self._branches, self._passes.wanted, self._to_follow, self._ready):
            kept.clear()
        return bool(held) or under_way is not None

    def advance(self) -> list[Proposal]:
        if self._ready:
            ready, self._ready = self._ready, []
            return ready
        if self._passes.is_idle:
            self._follow()
        return super().advance()

    def _give_up(self) -> None:
        for each in self._fallen.values():
            self._contexts.commit(each.wanted.verified.sequence)
        self._fallen.clear()

    def _is_of_use(self, growing: BranchPass) -> bool:
        is_kept = self._is_kept if growing.is_grown else self._may_fall
        return any(map(is_kept, growing.branches))

    def _may_fall(self, branch: Branch) -> bool:
        """Whether the verdict of a branch has fallen last, or may be one of the next two."""
        return super()._may_fall(branch) or self._holds(branch.wanted.key, branch.wanted.behind)

    def _holds(self, key: SequenceKey, branch: Branch | None) -> bool:
        return any(each is branch for each in self._branches.get(key, {}).values())

    def _is_kept(self, branch: Branch) -> bool:
        """Whether what may follow the rows of a branch may still be asked for."""
        key = branch.wanted.key
        kept = all_of(self._branches.get(key, {}).values())
        return self._rows.get(key) is branch.grown or any(each is branch for each in kept)

    def _follow(self) -> None:
        """Wants the verdicts on the trees of the likeliest branches. Waits for the device to find
        what may follow their nodes."""
        for key, plan in self._to_follow.items():
            branch = min(self._branches[key].values(), key=lambda each: each.wanted.verdict)
            is_likely = branch.wanted.verdict.cost <= -math.log(LEAST_FOLLOWED)
            if is_likely and not branch.followers:
                # Verdicts name the nodes that the target gets.
                tree = drop_unknown_tokens(branch.rows.tree, plan.sequence.vocab_size)
                wanted = self._likely(replace(plan, tree=tree), branch.rows, branch)
                self._passes.wanted.want(key, wanted)
        self._to_follow.clear()

    def _drop_followers(self) -> bool:
        held = [each for own in self._branches.values() for each in own.values() if each.followers]
        for each in held:
            self._free(each.followers.values())
            each.followers.clear()
        return bool(held)

    def _take(self, branch: Branch) -> Proposal | None:
        """Keeps a branch that has grown, or goes on in it if its verdict has fallen."""
        wanted, key = branch.wanted, branch.wanted.key
        if self._fallen.get(key) is branch:
            del self._fallen[key]
            self._adopt(wanted.verified.sequence, branch)
            return branch_proposal(branch, is_current=True)
        if self._rows.get(key) is wanted.rows:
            self._branches.setdefault(key, {})[wanted.path] = branch
            self._to_follow[key] = wanted.verified
            return branch_proposal(branch, is_current=False)
        if wanted.behind is not None and self._holds(key, wanted.behind):
            wanted.behind.followers[wanted.path] = branch
        else:
            self._free([branch])
        return None

    def _adopt(self, sequence: DraftSequence, branch: Branch) -> None:
        self._contexts.adopt(sequence, branch.kv, branch.rows)
        if self._contexts.backlog(sequence):
            # The window has moved on, and what is computed is in the old one.
            self._passes.leave_pages(branch.grown)
            self._free(branch.followers.values())
            return
        self._rows[sequence.key] = branch.rows
        self._branches[sequence.key] = branch.followers

    def _free(self, branches: Iterable[Branch]) -> None:
        for branch in all_of(branches):
            self._passes.free(branch)

    def _num_followed(self, shape: TreeShape) -> int:
        return num_choices(shape, self.budget)


log = logging.getLogger(__name__)


class StandaloneDrafter(TreeDrafter):
    """See `TreeDrafter`.

    Attributes:
        decoder: of the draft model.
    """

    _contexts: StandaloneContexts
    _branches: BranchDrafter

    def __init__(
        self,
        runner: ModelRunner,
        leases: KvLeases,
        grower: TreeGrower,
        *,
        max_context_tokens: int,
        generator: torch.Generator | None = None,
    ) -> None:
        """Args:
        grower: of the runner's model and pool.
        generator: see `PassTrees`.
        """
        self.decoder = runner.decoder
        model = DecoderModel(runner.decoder, runner.pool)
        contexts = StandaloneContexts(runner, leases, max_context_tokens=max_context_tokens)
        branches = BranchDrafter(PassTrees(grower, contexts, generator), contexts)
        super().__init__(model, contexts, branches, max_context_tokens=max_context_tokens)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        self._branches.commit(sequence, verdict.committed_token_ids)
