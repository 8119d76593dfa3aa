"""Grows trees in passes on the device, for the current round and ahead for possible verdicts.

Each likely verdict gets a *branch*: KV pages of its own after those that all branches of a sequence
share. They hold the keys and values of the nodes that the verdict would accept. In the branch the
bonus token is computed and a tree is grown from it, as if the verdict had arrived. When it arrives,
the sequence continues in that branch, where everything is computed: nothing is moved, and branches
for the verdicts on its tree, which the target verifies now, can be begun at once.

A pass for branches pauses after each forward, so that a verdict that arrives meanwhile is handled.
If the pass holds a branch for that verdict, the branch's tree is the current tree when the pass
ends. The remaining time goes into children of the likeliest branch: trees for the verdicts on its
tree, which are sent at once if its verdict arrives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.draft.drafters.contexts import ContextDrafter, Contexts, GrownRows, Path
from services.draft.drafters.drafter import DrafterLimits, Lookahead, Proposal, VerifiedTree
from services.draft.drafters.pass_trees import (
    Branch,
    BranchRequest,
    PassTrees,
    grown_shape,
    num_choices,
)
from services.draft.events import MappedHeadLimits
from services.draft.likely_verdicts import RankShares, likely_verdicts, rank_of
from services.draft.sequence import DraftSequence, SequenceKey
from shared.runtime.outcome_chains import MAX_OUTCOMES
from shared.runtime.tree_model import RoundModel, TreeModel
from shared.runtime.tree_pass import GrowingTrees
from shared.speculation.tree import row_paths
from shared.tokens import TreeShape

# Passes that grow the trees of branches, one at a time. A pass can pause after any forward, and
# ends early once none of its branches can be used any more.


@dataclass(slots=True)
class BranchPass:
    """One pass for several branches.

    Attributes:
        is_grown: the trees are grown; the continuations of their nodes are yet to be found.
        unneeded: branches to free when the pass ends, because it still writes to their pages.
    """

    trees: GrowingTrees
    branches: Sequence[Branch]
    is_grown: bool = False
    unneeded: list[Branch] = field(default_factory=list)


def _take(queue: dict[SequenceKey, list[BranchRequest]], count: int) -> list[BranchRequest]:
    """Removes and returns up to `count` waiting requests whose trees have the same shape."""
    batch: list[BranchRequest] = []
    for key, requests in list(queue.items()):
        room = count - len(batch)
        if batch and requests and requests[0].verified.shape != batch[0].verified.shape:
            continue
        batch += requests[:room]
        if len(requests) > room:
            queue[key] = requests[room:]
            break
        del queue[key]
    return batch


class BranchPasses:
    """Runs passes over the branch requests that wait, as many requests as fit a pass.

    Args:
        make_room: frees pages of less important branches; returns whether there were any.

    Attributes:
        queue: branch requests that wait for a pass, of each sequence.
        under_way: the current pass, if there is one.
        budget: see `Lookahead`.
    """

    def __init__(
        self,
        trees: PassTrees,
        contexts: Contexts,
        *,
        make_room: Callable[[], bool],
    ) -> None:
        self.queue: dict[SequenceKey, list[BranchRequest]] = {}
        self.under_way: BranchPass | None = None
        self._trees, self._contexts = trees, contexts
        self.budget = 0
        self._make_room = make_room

    @property
    def is_idle(self) -> bool:
        """Whether there is no pass, and no request waits."""
        return self.under_way is None and not self.queue

    def advance(self, is_useful: Callable[[BranchPass], bool]) -> Sequence[Branch]:
        """Queues a forward of the current pass, or of a new one if there is none; returns the
        branches whose trees this completed.

        Args:
            is_useful: whether the remaining work of a pass may still be used.
        """
        branch_pass = self.under_way = self.under_way or self._begin()
        if branch_pass is None:
            return ()
        if not is_useful(branch_pass):
            self.give_up()
            return ()
        branch_pass.trees.advance()
        if branch_pass.is_grown:
            self._end(branch_pass)
            return ()
        if not branch_pass.trees.has_trees:
            return ()
        is_left = branch_pass.trees.run_on()
        for branch, grown in zip(branch_pass.branches, branch_pass.trees.read(), strict=True):
            branch.grown = GrownRows(grown)
        branch_pass.is_grown = True
        self.under_way = branch_pass if is_left else None
        return branch_pass.branches

    def growing_after(self, rows: GrownRows | None) -> list[Branch]:
        """Returns the branches that grow in the current pass for verdicts on the tree of `rows`."""
        branch_pass = self.under_way
        branches = () if branch_pass is None or branch_pass.is_grown else branch_pass.branches
        return [branch for branch in branches if branch.request.rows is rows]

    def growing_branch(self, rows: GrownRows | None, path: Path) -> Branch | None:
        """Returns the one of these branches whose verdict commits `path`."""
        branches = self.growing_after(rows)
        return next((branch for branch in branches if branch.request.path == path), None)

    def finish_writes(self, rows: GrownRows | None) -> None:
        """Call before the pages of `rows` may be freed: queues the rest of the pass that writes to
        them, so that it writes nothing later. The pass is not given up, because another sequence
        may have continued in one of its trees and need the rows of the leaves."""
        if self.under_way is not None and self._has_grown(rows):
            self.under_way.trees.queue()

    def free(self, branch: Branch) -> None:
        """Frees a grown branch, at the end of the current pass if that writes to its pages."""
        if self.under_way is not None and self._has_grown(branch.grown):
            self.under_way.unneeded.append(branch)
        else:
            self._contexts.leases.drop_branch(branch.kv.own)

    def give_up(self) -> None:
        """Ends the current pass without computing the rest of it."""
        branch_pass = self.under_way
        if branch_pass is None:
            return
        branch_pass.trees.give_up()
        if not branch_pass.is_grown:
            branch_pass.unneeded.extend(branch_pass.branches)
        self._end(branch_pass)

    def _begin(self) -> BranchPass | None:
        """Begins a pass for waiting requests; None where there are no pages for any of them."""
        branches: list[Branch] = []
        for request in _take(self.queue, self._trees.max_sequences):
            parent = None if request.parent is None else request.parent.kv
            sequence, shape = request.verified.sequence, request.verified.shape
            # Where tree rows are not kept, the leaves need none: nothing continues from them.
            num_levels = shape.num_steps if self._contexts.keeps_tree_rows else shape.num_steps - 1
            place = parent, request.rows.rows_by_path[request.accepted], num_levels * shape.topk
            kv = self._contexts.branch(sequence, *place)
            if kv is None and parent is None and self._make_room():
                kv = self._contexts.branch(sequence, *place)
            if kv is not None:
                branches.append(Branch(request, kv))
        if not branches:
            return None
        requests = [branch.request for branch in branches]
        rows = [
            self._contexts.branch_sequence(
                branch.request.verified.sequence, branch.kv, branch.request.verdict.token
            )
            for branch in branches
        ]
        trees = self._trees.begin(requests, rows, self.budget)
        return BranchPass(trees, branches)

    def _end(self, branch_pass: BranchPass) -> None:
        """Frees the branches that the pass does not write to any more."""
        self.under_way = None
        for branch in branch_pass.unneeded:
            self._contexts.leases.drop_branch(branch.kv.own)

    def _has_grown(self, rows: GrownRows | None) -> bool:
        branches = () if self.under_way is None else self.under_way.branches
        return rows is not None and any(branch.grown is rows for branch in branches)


class BranchLookahead(Lookahead, ABC):
    """A `Lookahead` by branches. Sequences that do not `grows_whole` get no branches.

    Attributes:
        trees: grows the trees of current rounds and of branches.
    """

    _contexts: Contexts

    def __init__(self, trees: PassTrees, contexts: Contexts) -> None:
        self.trees, self._contexts = trees, contexts
        self._shares = RankShares()
        self._passes = BranchPasses(trees, contexts, make_room=self._drop_children)
        # The computed rows of the trees under verification.
        self._rows: dict[SequenceKey, GrownRows] = {}
        # Branches that still grow although their verdicts have arrived: their trees are due now.
        self._decided: dict[SequenceKey, Branch] = {}

    @property
    def budget(self) -> int:
        return self._passes.budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._passes.budget = budget
        if not budget:
            self._give_up()

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Grows trees for the current round after reserved sequences that are complete."""
        shape = self.trees.shape(shape)
        whole = [sequence for sequence in sequences if sequence.grows_whole]
        rest = [sequence for sequence in sequences if not sequence.grows_whole]
        for sequence in whole:
            self.drop(sequence)
        grown = self.trees.grow(whole, shape, num_choices(shape, self.budget))
        self._rows.update(zip((sequence.key for sequence in whole), grown, strict=True))
        trees = [*(rows.tree for rows in grown), *self.trees.grow_scored(rest, shape)]
        return list(map(Proposal, (*whole, *rest), trees))

    def resume(self, sequence: DraftSequence) -> bool:
        """Whether the tree for the current round grows already."""
        return sequence.key in self._decided

    @abstractmethod
    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Applies a verdict, see `Drafter.commit`, and drops the branches for other verdicts.

        Args:
            token_ids: the tokens that the verdict commits.
        """

    @abstractmethod
    def drop(self, sequence: DraftSequence) -> None:
        """Forgets a sequence and frees its branches; growing ones at the end of their pass."""

    @abstractmethod
    def make_room(self) -> bool:
        """Frees all branches but those that a current round waits for; whether there were any."""

    def advance(self) -> list[Proposal]:
        """Queues a forward of a pass; returns the trees that it completed."""
        collected = map(self._collect, self._passes.advance(self._is_useful))
        return [proposal for proposal in collected if proposal is not None]

    @abstractmethod
    def _give_up(self) -> None:
        """Forgets what grows ahead: trees of current rounds begin anew."""

    @abstractmethod
    def _collect(self, branch: Branch) -> Proposal | None:
        """Handles a branch whose tree has grown; returns the tree if it can be used."""

    def _likely_requests(
        self, verified: VerifiedTree, rows: GrownRows, parent: Branch | None = None
    ) -> list[BranchRequest]:
        """Returns requests for the likeliest verdicts on a tree, by the continuations of its rows
        and by how often the target took the choice of each rank. Waits for the device to find the
        continuations.

        Args:
            parent: see `BranchRequest`.
        """
        paths = row_paths(verified.tree)
        continuations = [rows.continuations(path) for path in paths]
        verdicts = likely_verdicts(verified.tree, continuations, self._shares, verified.budget)
        return [BranchRequest(verified, v, paths[v.tree_row], rows, parent) for v in verdicts]

    def _observe(self, rows: GrownRows, path: Path) -> None:
        """Counts the ranks of the choices that the target took. A verdict commits `path`."""
        for depth, token in enumerate(path):
            choices = rows.continuations(path[:depth])
            if not choices:
                return
            self._shares.observe(rank_of(choices, token))

    def _is_useful(self, branch_pass: BranchPass) -> bool:
        return any(map(self._is_possible, branch_pass.branches))

    def _is_possible(self, branch: Branch) -> bool:
        """Whether the verdict of a branch was the last one, or may be the next one."""
        request = branch.request
        is_next = self._rows.get(request.key) is request.rows
        return is_next or self._decided.get(request.key) is branch

    def _drop_children(self) -> bool:
        """Frees the children of all branches; returns whether there were any."""
        return False


def branch_proposal(branch: Branch, *, is_current: bool) -> Proposal:
    """Returns the tree of a branch, for the round that its verdict begins."""
    verified = branch.request.verified
    condition = None if is_current else branch.request.verdict.condition
    return Proposal(verified.sequence, branch.rows.tree, condition, verified.shape)


class TreeDrafter(ContextDrafter):
    """A drafter whose trees and branches are grown by a `BranchLookahead`.

    Args:
        branches: grows trees, and drafts ahead; None for a drafter that grows its trees itself.
    """

    _branches: BranchLookahead | None

    def __init__(
        self,
        model: TreeModel,
        contexts: Contexts,
        branches: BranchLookahead | None,
        *,
        max_context_tokens: int,
    ) -> None:
        self._model, self._contexts, self._branches = model, contexts, branches
        self._max_context_tokens = max_context_tokens

    @property
    def limits(self) -> DrafterLimits:
        return DrafterLimits(
            vocab_size=self._model.id_limit,
            max_context_tokens=self._max_context_tokens,
            feature_spec=self._model.feature_spec,
            mapped_head=self._mapped_head,
        )

    @property
    def lookahead(self) -> BranchLookahead | None:
        return self._branches

    @property
    def _mapped_head(self) -> MappedHeadLimits | None:
        """Sizes of the model in a target's rounds; None where it takes part in none."""
        model = self._round_model
        if model is None:
            return None
        outcomes = MAX_OUTCOMES if model.feature_spec is None else 0
        max_context = self._contexts.max_rows
        return MappedHeadLimits(model.pool.page_size, model.vocab_size, max_context, outcomes)

    @property
    def _round_model(self) -> RoundModel | None:
        # A model that is sharded over several processes takes part in none.
        return None if self._model.group is not None else self._model

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        shape = grown_shape(shape, self._model.vocab_size)
        # Where the drafter prepares for verdicts, the rows of a tree's leaves are computed, too.
        is_ahead = self._branches is not None and self._branches.budget > 0
        num_levels = shape.num_steps if is_ahead else shape.num_steps - 1
        num_rows = num_levels * shape.topk
        has_room = self._contexts.reserve(sequence, num_rows)
        if not has_room and self._branches is not None and self._branches.make_room():
            has_room = self._contexts.reserve(sequence, num_rows)
        return has_room

    def close(self, sequence: DraftSequence) -> None:
        self._drop_ahead(sequence)
        self._contexts.close(sequence)

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        branches = self._branches
        return branches is None or branches.trees.is_prepared(shape, num_sequences, branches.budget)

    def prepare(self, shape: TreeShape, num_sequences: int | None) -> bool:
        """Captures a graph."""
        branches = self._branches
        return branches is not None and branches.trees.prepare(
            shape, num_sequences, branches.budget
        )

    def _drop_ahead(self, sequence: DraftSequence) -> None:
        if self._branches is not None:
            self._branches.drop(sequence)

    def _propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        assert self._branches is not None
        return self._branches.propose(sequences, shape)
