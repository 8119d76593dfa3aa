"""Drafts with a smaller language model that has its own paged KV and prefix cache.

The KV of the accepted path is kept: a chain's is in place already, a tree's is moved to the front
of the drafted subtree. Branches have pages of their own, see `branch_drafter`.
"""

from __future__ import annotations

import itertools
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
from services.draft.drafters.pass_trees import Branch, PassTrees, with_descendants
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey, drop_unknown_tokens
from shared.kv.batch import build_batch
from shared.kv.leases import KvLeases
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import DecoderModel
from shared.runtime.tree_pass import OpenSequence
from shared.tokens import Verdict


class StandaloneContexts(Contexts):
    """The row of a position reads the token there, so the rows of a tree stay valid."""

    token_offset = 0
    keeps_tree_rows = True

    def __init__(self, runner: ModelRunner, leases: KvLeases, *, max_context_tokens: int) -> None:
        super().__init__(runner.pool, leases, max_context_tokens=max_context_tokens)
        self._runner = runner

    def commit(self, sequence: DraftSequence) -> None:
        """Call after new tokens were committed: keeps the KV of those that the last tree held.

        It matches tokens, not the verdict's node indices: the verified tree may have been another
        one, and KV depends on the tokens before it only.
        """
        kv = self.kv_of(sequence)
        subtree, kv.subtree = kv.subtree, None
        if subtree is not None:
            base, pages = kv.num_computed, kv.lease.pages
            rows = subtree.longest_match(sequence.token_ids[kv.window_start + base :])
            moved = [(row, index) for index, row in enumerate(rows) if row != index]
            sources = [base + row for row, _ in moved]
            self._add_moves(pages, sources, pages, [base + index for _, index in moved])
            kv.num_computed += len(rows)
        self._slide(sequence)

    def adopt(self, sequence: DraftSequence, branch: BranchKv, rows: GrownRows) -> None:
        """Continues a sequence in a branch that has computed all committed tokens.

        Args:
            rows: rows of the tree after them in the branch.
        """
        kv = self.kv_of(sequence)
        self.leases.adopt(kv.lease, branch.own)
        kv.num_computed, kv.subtree = self.num_window_rows(sequence), None
        self._slide(sequence)
        if not self.backlog(sequence):
            self.set_subtree(sequence, rows)

    def backlog(self, sequence: DraftSequence) -> int:
        return self.num_window_rows(sequence) - self.kv_of(sequence).num_computed

    def is_complete(self, sequence: DraftSequence) -> bool:
        return True

    def branch(
        self, sequence: DraftSequence, parent: BranchKv | None, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        """See `Contexts.branch`; None also where the drafted subtree is overwritten."""
        if parent is None and self.kv_of(sequence).subtree is None:
            return None
        return super().branch(sequence, parent, path, num_rows)

    def compute_rows(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        runner = self._runner
        rows = [self._next_rows(sequence, count) for sequence, count in counts]
        self.apply_moves()
        runner.run(build_batch(rows, page_size=runner.page_size, device=runner.device))

    def _open_sequence(self, sequence: DraftSequence) -> OpenSequence:
        if not self.backlog(sequence):
            # The last token was computed as a tree node, and its logits are gone: compute it again.
            self.kv_of(sequence).num_computed -= 1
        return super()._open_sequence(sequence)

    def _cache_keys(self, sequence: DraftSequence, window_start: int, count: int) -> Sequence[int]:
        return sequence.token_ids[window_start : window_start + count]

    def _move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        self._runner.move(moves)

    def _slide(self, sequence: DraftSequence) -> None:
        if self.num_window_rows(sequence) > self.max_rows:
            self._restart(sequence, sequence.num_tokens - self.num_kept_rows)


MIN_PARENT_PROBABILITY = 0.25
"""Least probability of a branch's verdict for which children of the branch pay: if another verdict
arrives, the current pass delays the work for that one by a forward."""


class BranchDrafter(BranchLookahead):
    """Continues a sequence in the branch whose verdict arrives, and grows children of branches."""

    _contexts: StandaloneContexts

    def __init__(self, trees: PassTrees, contexts: StandaloneContexts) -> None:
        super().__init__(trees, contexts)
        # Grown branches of each sequence, by the tokens that their verdicts commit.
        self._branches: dict[SequenceKey, dict[Path, Branch]] = {}
        # Sequences whose likeliest branch may get children.
        self._to_extend: dict[SequenceKey, VerifiedTree] = {}
        # Trees of children whose parent's verdict has arrived.
        self._ready: list[Proposal] = []

    @property
    def has_work(self) -> bool:
        return bool(self._to_extend or self._ready) or not self._passes.is_idle

    def begin(self, verified: VerifiedTree) -> None:
        key = verified.sequence.key
        rows = self._rows.get(key)
        if rows is None:
            return
        verified = replace(verified, shape=self.trees.shape(verified.shape))
        branches = self._branches.get(key, {})
        if branches:
            self._ready += [branch_proposal(b, is_current=False) for b in branches.values()]
            self._to_extend[key] = verified
        growing = self._passes.growing_after(rows)
        paths = {*branches, *(branch.request.path for branch in growing)}
        if 2 * len(paths) < verified.budget:
            requests = self._likely_requests(verified, rows)
            new_requests = [request for request in requests if request.path not in paths]
            self._passes.queue[key] = new_requests

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        key, path = sequence.key, tuple(token_ids)
        rows = self._rows.get(key)
        if rows is not None:
            self._observe(rows, path)
        branch = self._branches.get(key, {}).pop(path, None)
        growing = None if rows is None else self._passes.growing_branch(rows, path)
        self.drop(sequence)
        if branch is not None:
            self._adopt(sequence, branch)
        elif growing is not None:
            self._decided[key] = growing
        else:
            self._contexts.commit(sequence)

    def drop(self, sequence: DraftSequence) -> None:
        key = sequence.key
        self._passes.queue.pop(key, None)
        self._passes.finish_writes(self._rows.pop(key, None))
        self._decided.pop(key, None)
        self._to_extend.pop(key, None)
        self._ready = [proposal for proposal in self._ready if proposal.sequence is not sequence]
        self._free(self._branches.pop(key, {}).values())

    def make_room(self) -> bool:
        under_way = None if self._decided else self._passes.under_way
        if under_way is not None:
            if under_way.is_grown:
                # A sequence may have continued in a grown tree, and need the rows of its leaves.
                under_way.trees.queue()
            self._passes.give_up()
        held = [branches for branches in self._branches.values() if branches]
        for branches in held:
            self._free(branches.values())
        for state in (self._branches, self._passes.queue, self._to_extend, self._ready):
            state.clear()
        return bool(held) or under_way is not None

    def advance(self) -> list[Proposal]:
        if self._ready:
            ready, self._ready = self._ready, []
            return ready
        if self._passes.is_idle:
            self._request_children()
        return super().advance()

    def _give_up(self) -> None:
        for branch in self._decided.values():
            self._contexts.commit(branch.request.verified.sequence)
        self._decided.clear()

    def _is_useful(self, branch_pass: BranchPass) -> bool:
        is_useful = self._is_kept if branch_pass.is_grown else self._is_possible
        return any(map(is_useful, branch_pass.branches))

    def _is_possible(self, branch: Branch) -> bool:
        """Whether the verdict of a branch was the last one, or may be one of the next two."""
        request = branch.request
        return super()._is_possible(branch) or self._holds(request.key, request.parent)

    def _holds(self, key: SequenceKey, branch: Branch | None) -> bool:
        return any(held is branch for held in self._branches.get(key, {}).values())

    def _is_kept(self, branch: Branch) -> bool:
        """Whether the continuations of a branch's rows may still be used."""
        key = branch.request.key
        kept_branches = with_descendants(self._branches.get(key, {}).values())
        return self._rows.get(key) is branch.grown or any(kept is branch for kept in kept_branches)

    def _request_children(self) -> None:
        """Requests children of the likeliest branches. Waits for the device to find the
        continuations of their nodes."""
        for key, plan in self._to_extend.items():
            branches = self._branches[key].values()
            branch = min(branches, key=lambda branch: branch.request.verdict)
            is_likely = branch.request.verdict.cost <= -math.log(MIN_PARENT_PROBABILITY)
            if is_likely and not branch.children:
                # A verdict names nodes of the tree that the target receives.
                tree = drop_unknown_tokens(branch.rows.tree, plan.sequence.vocab_size)
                requests = self._likely_requests(replace(plan, tree=tree), branch.rows, branch)
                self._passes.queue[key] = requests
        self._to_extend.clear()

    def _drop_children(self) -> bool:
        branches = itertools.chain(*(held.values() for held in self._branches.values()))
        parents = [branch for branch in branches if branch.children]
        for parent in parents:
            self._free(parent.children.values())
            parent.children.clear()
        return bool(parents)

    def _collect(self, branch: Branch) -> Proposal | None:
        """Keeps a grown branch, or continues its sequence in it if its verdict has arrived."""
        request, key = branch.request, branch.request.key
        if self._decided.get(key) is branch:
            del self._decided[key]
            self._adopt(request.verified.sequence, branch)
            return branch_proposal(branch, is_current=True)
        if self._rows.get(key) is request.rows:
            self._branches.setdefault(key, {})[request.path] = branch
            self._to_extend[key] = request.verified
            return branch_proposal(branch, is_current=False)
        if request.parent is not None and self._holds(key, request.parent):
            request.parent.children[request.path] = branch
        else:
            self._free([branch])
        return None

    def _adopt(self, sequence: DraftSequence, branch: Branch) -> None:
        self._contexts.adopt(sequence, branch.kv, branch.rows)
        if self._contexts.backlog(sequence):
            # The window has restarted, and the branch's rows are in the old one.
            self._passes.finish_writes(branch.grown)
            self._free(branch.children.values())
            return
        self._rows[sequence.key] = branch.rows
        self._branches[sequence.key] = branch.children

    def _free(self, branches: Iterable[Branch]) -> None:
        for branch in with_descendants(branches):
            self._passes.free(branch)


log = logging.getLogger(__name__)


class StandaloneDrafter(TreeDrafter):
    """Drafts with a language model; see `TreeDrafter`.

    Attributes:
        decoder: the draft model's decoder.
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
        grower: for the runner's model and pool.
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
