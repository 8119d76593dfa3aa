"""Grows trees in passes of the device, those for the verdicts to come as well.

Each likely verdict gets a *branch*: pages of its own behind those that all branches of a sequence
share, holding the keys and values of the nodes that the verdict would accept. In it the bonus token
is computed and a tree grown from it, as if the verdict had fallen. When it falls the sequence goes
on in its branch, where everything is computed: nothing is moved, and the trees for the verdicts on
the tree that is verified now can be begun at once.

A pass for verdicts to come stops after each forward, so that a verdict that arrives meanwhile is
heeded. If it is one of those that the pass is for, its tree is the current one when the pass ends.
What time is left goes into the likeliest branch: trees for the verdicts on its tree, which are out
at once if its verdict falls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.draft.drafters.contexts import ContextDrafter, Contexts, GrownRows, Path
from services.draft.drafters.drafter import DrafterLimits, Lookahead, Proposal, VerifiedTree
from services.draft.drafters.pass_trees import (
    Branch,
    PassTrees,
    Wanted,
    WantedBranches,
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

# Passes that grow the trees of branches, one at a time, each of which can stop after any forward.
#
# What a pass has yet to compute is left out as soon as nobody may ask for it.


@dataclass(slots=True)
class BranchPass:
    """One pass for several branches.

    Attributes:
        is_grown: the trees are there; what may follow their nodes is yet to be found.
        unneeded: of its branches those that are freed when the pass ends, which writes to them.
    """

    trees: GrowingTrees
    branches: Sequence[Branch]
    is_grown: bool = False
    unneeded: list[Branch] = field(default_factory=list)


class BranchPasses:
    """Takes on verdicts that are wanted, as many as a pass grows trees for.

    Args:
        num_choices: how many tokens to find after each row of a tree, see `TreeGrower.begin`.
        make_room: frees pages of branches that are wanted less; returns whether there were any.

    Attributes:
        wanted: verdicts that wait for a pass.
        under_way: the pass, if there is one.
    """

    def __init__(
        self,
        trees: PassTrees,
        contexts: Contexts,
        *,
        num_choices: Callable[[TreeShape], int],
        make_room: Callable[[], bool],
    ) -> None:
        self.wanted = WantedBranches()
        self.under_way: BranchPass | None = None
        self._trees, self._contexts = trees, contexts
        self._num_choices, self._make_room = num_choices, make_room

    @property
    def is_idle(self) -> bool:
        """Whether there is no pass, and none is wanted."""
        return self.under_way is None and not self.wanted

    def advance(self, is_of_use: Callable[[BranchPass], bool]) -> Sequence[Branch]:
        """Queues a forward of the pass under way, of the next one if there is none; returns the
        branches whose trees are there since.

        Args:
            is_of_use: whether what the pass has yet to compute may be asked for.
        """
        growing = self.under_way = self.under_way or self._begin()
        if growing is None:
            return ()
        if not is_of_use(growing):
            self.give_up()
            return ()
        growing.trees.advance()
        if growing.is_grown:
            self._end(growing)
            return ()
        if not growing.trees.has_trees:
            return ()
        is_left = growing.trees.run_on()
        for branch, grown in zip(growing.branches, growing.trees.read(), strict=True):
            branch.grown = GrownRows(grown)
        growing.is_grown = True
        self.under_way = growing if is_left else None
        return growing.branches

    def growing_behind(self, rows: GrownRows | None) -> list[Branch]:
        """Returns the branches under way for verdicts on grown trees."""
        growing = self.under_way
        branches = () if growing is None or growing.is_grown else growing.branches
        return [each for each in branches if each.wanted.rows is rows]

    def growing(self, rows: GrownRows | None, path: Path) -> Branch | None:
        """Returns that of the verdict which commits a path."""
        behind = self.growing_behind(rows)
        return next((each for each in behind if each.wanted.path == path), None)

    def leave_pages(self, rows: GrownRows | None) -> None:
        """Others may have the pages of rows from now on, so the pass that computed them there
        writes no more. Another sequence may have gone on in what it has grown, and counts on the
        leaves."""
        if self.under_way is not None and self._has_grown(rows):
            self.under_way.trees.queue()

    def free(self, branch: Branch) -> None:
        """Frees a branch that has grown, when the pass that writes to it ends."""
        if self.under_way is not None and self._has_grown(branch.grown):
            self.under_way.unneeded.append(branch)
        else:
            self._contexts.leases.drop_branch(branch.kv.own)

    def give_up(self) -> None:
        """Leaves out what the pass under way has yet to compute."""
        growing = self.under_way
        if growing is None:
            return
        growing.trees.give_up()
        if not growing.is_grown:
            growing.unneeded.extend(growing.branches)
        self._end(growing)

    def _begin(self) -> BranchPass | None:
        """Begins a pass for verdicts that are wanted; None where there are no pages for any."""
        wanted = self.wanted.take(self._trees.max_sequences)
        branches = [each for each in map(self._branch, wanted) if each is not None]
        if not branches:
            return None
        wanted = [each.wanted for each in branches]
        rows = [
            self._contexts.branch_sequence(
                each.wanted.verified.sequence, each.kv, each.wanted.verdict.token
            )
            for each in branches
        ]
        trees = self._trees.begin(wanted, rows, self._num_choices(wanted[0].verified.shape))
        return BranchPass(trees, branches)

    def _branch(self, wanted: Wanted) -> Branch | None:
        behind = None if wanted.behind is None else wanted.behind.kv
        sequence, path = wanted.verified.sequence, wanted.rows.line(wanted.accepted)
        num_rows = self._trees.num_branch_rows(wanted.verified.shape)
        kv = self._contexts.branch(sequence, behind, path, num_rows)
        if kv is None and behind is None and self._make_room():
            kv = self._contexts.branch(sequence, behind, path, num_rows)
        return None if kv is None else Branch(wanted, kv)

    def _end(self, growing: BranchPass) -> None:
        """A pass writes no more."""
        self.under_way = None
        for branch in growing.unneeded:
            self._contexts.leases.drop_branch(branch.kv.own)

    def _has_grown(self, rows: GrownRows | None) -> bool:
        branches = () if self.under_way is None else self.under_way.branches
        return rows is not None and any(each.grown is rows for each in branches)


class BranchLookahead(Lookahead, ABC):
    """See `Lookahead`. Those that do not `grows_whole` get no trees for verdicts to come."""

    _contexts: Contexts

    def __init__(self, trees: PassTrees, contexts: Contexts) -> None:
        self._budget = 0
        self._trees, self._contexts = trees, contexts
        self._shares = RankShares()
        self._passes = BranchPasses(
            trees, contexts, num_choices=self._num_followed, make_room=self._drop_followers
        )
        # Of the trees that are verified, as far as they are computed.
        self._rows: dict[SequenceKey, GrownRows] = {}
        self._fallen: dict[SequenceKey, Branch] = {}

    @property
    def budget(self) -> int:
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget
        if not budget:
            self._give_up()

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        """See `Drafter.is_prepared`."""
        return self._trees.is_prepared(self._trees.shape(shape), num_sequences, self.budget)

    def prepare(self, shape: TreeShape, num_sequences: int | None) -> bool:
        """See `Drafter.prepare`."""
        return self._trees.prepare(self._trees.shape(shape), num_sequences, self.budget)

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Grows trees for the current round behind reserved sequences that are complete."""
        shape = self._trees.shape(shape)
        whole = [each for each in sequences if each.grows_whole]
        rest = [each for each in sequences if not each.grows_whole]
        for sequence in whole:
            self.drop(sequence)
        grown = self._trees.grow(whole, shape, num_choices(shape, self.budget))
        self._rows.update(zip((each.key for each in whole), grown, strict=True))
        trees = [*(rows.tree for rows in grown), *self._trees.grow_scored(rest, shape)]
        return list(map(Proposal, (*whole, *rest), trees))

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """The tree may be among those that grow; there is nothing else to go on from."""
        return sequence.key in self._fallen

    @abstractmethod
    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Takes a verdict, see `Drafter.commit`, and drops the branches prepared for others.

        Args:
            token_ids: what it commits.
        """

    @abstractmethod
    def drop(self, sequence: DraftSequence) -> None:
        """Forgets a sequence and frees its branches; those that grow are freed when they end."""

    @abstractmethod
    def make_room(self) -> bool:
        """Gives up all branches because memory is short, but for those of a pass that a current
        round waits for; returns whether there were any."""

    def advance(self) -> list[Proposal]:
        """Queues a forward of a pass, or takes what the last one has grown."""
        taken = map(self._take, self._passes.advance(self._is_of_use))
        return [proposal for proposal in taken if proposal is not None]

    @abstractmethod
    def _give_up(self) -> None:
        """Nobody asks for what grows: trees of current rounds begin anew."""

    @abstractmethod
    def _take(self, branch: Branch) -> Proposal | None:
        """Takes a branch that has grown; returns its tree if it is asked for."""

    def _likely(
        self, verified: VerifiedTree, rows: GrownRows, behind: Branch | None = None
    ) -> list[Wanted]:
        """Returns the likeliest verdicts on a tree by what may follow its rows, and by how often
        the target has taken which of its choices. Waits for the device to find what may follow.

        Args:
            behind: see `Wanted`.
        """
        paths = row_paths(verified.tree)
        continuations = [rows.after(path) for path in paths]
        verdicts = likely_verdicts(verified.tree, continuations, self._shares, verified.budget)
        return [Wanted(verified, each, paths[each.place], rows, behind) for each in verdicts]

    def _observe(self, rows: GrownRows, path: Path) -> None:
        """Learns which of its choices the target took; `path` is what a verdict commits."""
        for depth, token in enumerate(path):
            choices = rows.after(path[:depth])
            if not choices:
                return
            self._shares.observe(rank_of(choices, token))

    def _is_of_use(self, growing: BranchPass) -> bool:
        return any(map(self._may_fall, growing.branches))

    def _may_fall(self, branch: Branch) -> bool:
        """Whether the verdict of a branch has fallen last, or may be the next."""
        wanted = branch.wanted
        is_next = self._rows.get(wanted.key) is wanted.rows
        return is_next or self._fallen.get(wanted.key) is branch

    def _num_followed(self, shape: TreeShape) -> int:
        """Returns how many tokens to find after each row of a branch, see `TreeGrower.begin`."""
        return 0

    def _drop_followers(self) -> bool:
        """Gives up what is prepared for verdicts after the next; returns whether there was any."""
        return False


def branch_proposal(branch: Branch, *, is_current: bool) -> Proposal:
    """Returns the tree of a branch, for the round that its verdict begins."""
    verified = branch.wanted.verified
    condition = None if is_current else branch.wanted.verdict.condition
    return Proposal(verified.sequence, branch.rows.tree, condition, verified.shape)


class TreeDrafter(ContextDrafter):
    """See `Drafter`.

    Args:
        branches: grows trees, and drafts ahead; None where the drafter has a way of its own.
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
        """Sizes of the model in rounds of a target; None where it takes part in none."""
        model = self._round_model
        if model is None:
            return None
        outcomes = MAX_OUTCOMES if model.feature_spec is None else 0
        longest = self._contexts.longest
        return MappedHeadLimits(model.pool.page_size, model.vocab_size, longest, outcomes)

    @property
    def _round_model(self) -> RoundModel | None:
        # One that several processes hold takes part in none.
        return None if self._model.group is not None else self._model

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        shape = self._grown_shape(shape)
        # Where verdicts are prepared for, the leaves of trees are computed, too.
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
        return self._branches is None or self._branches.is_prepared(shape, num_sequences)

    def prepare(self, shape: TreeShape, num_sequences: int | None) -> bool:
        """Captures a graph."""
        return self._branches is not None and self._branches.prepare(shape, num_sequences)

    def _drop_ahead(self, sequence: DraftSequence) -> None:
        if self._branches is not None:
            self._branches.drop(sequence)

    def _propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        assert self._branches is not None
        return self._branches.propose(sequences, shape)

    def _grown_shape(self, shape: TreeShape) -> TreeShape:
        return grown_shape(shape, self._model.vocab_size)
