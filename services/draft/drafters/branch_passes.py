"""Passes that grow the trees of branches, one at a time, each of which can stop after any forward.

What a pass has yet to compute is left out as soon as nobody may ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.draft.drafters.branches import GrowingBranch, GrownRows, Wanted, WantedBranches
from services.draft.drafters.draft_kv import BranchKv
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLeases
from shared.runtime.growing_trees import GrowingTrees
from shared.runtime.open_sequence import OpenSequence
from shared.tokens import TreeShape


class BranchTrees(Protocol):
    """Grows trees in branches."""

    @property
    def max_sequences(self) -> int:
        """Trees that one pass grows."""

    def num_branch_rows(self, shape: TreeShape) -> int:
        """Returns the rows of a tree that are computed in a branch."""

    def begin(
        self, wanted: Sequence[Wanted], rows: Sequence[OpenSequence], num_choices: int
    ) -> GrowingTrees:
        """Begins to grow a tree of one shape in each branch, behind the token that ends its
        verdict. The pass can stop while other trees are grown; the next one gives it up."""


class BranchContexts(Protocol):
    """Gives branches their pages."""

    @property
    def leases(self) -> KvLeases:
        """The leases that pages are returned to."""

    def branch(
        self, sequence: DraftSequence, behind: BranchKv | None, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        """Returns pages for what may follow computed rows; None where there are none."""

    def branch_sequence(
        self, sequence: DraftSequence, branch: BranchKv, token_id: int
    ) -> OpenSequence:
        """Lays out the token that ends the verdict of a branch."""


@dataclass(slots=True)
class BranchPass:
    """One pass for several branches.

    Attributes:
        grown: by branch, once the trees are there; what may follow their nodes is yet to be found.
        unneeded: branches of those that are freed when the pass ends, which writes to them.
    """

    trees: GrowingTrees
    branches: Sequence[GrowingBranch]
    grown: Sequence[GrownRows] = ()
    unneeded: list[BranchKv] = field(default_factory=list)


class BranchPasses:
    """Takes on verdicts that are wanted, as many as a pass grows trees for.

    Args:
        num_choices: how many tokens to find after each row of a tree, see `TreeGrower.launch`.
        make_room: frees pages of branches that are wanted less; returns whether there were any.

    Attributes:
        wanted: verdicts that wait for a pass.
    """

    def __init__(
        self,
        trees: BranchTrees,
        contexts: BranchContexts,
        *,
        num_choices: Callable[[TreeShape], int],
        make_room: Callable[[], bool],
    ) -> None:
        self.wanted = WantedBranches()
        self._trees, self._contexts = trees, contexts
        self._num_choices, self._make_room = num_choices, make_room
        self._pass: BranchPass | None = None

    @property
    def under_way(self) -> BranchPass | None:
        return self._pass

    @property
    def is_idle(self) -> bool:
        """Whether there is no pass, and none is wanted."""
        return self._pass is None and not self.wanted

    def advance(
        self, is_of_use: Callable[[BranchPass], bool]
    ) -> list[tuple[GrowingBranch, GrownRows]]:
        """Queues a forward of the pass under way, of the next one if there is none; returns the
        branches whose trees are there since.

        Args:
            is_of_use: whether what the pass has yet to compute may be asked for.
        """
        self._pass = self._pass or self._begin()
        if self._pass is None:
            return []
        if not is_of_use(self._pass):
            self.give_up()
            return []
        self._pass.trees.advance()
        if self._pass.grown:
            self._end(self._pass)
            return []
        return self._grown(self._pass) if self._pass.trees.has_trees else []

    def growing_behind(self, rows: GrownRows) -> list[GrowingBranch]:
        """Returns the branches under way for verdicts on grown trees."""
        branches = () if self._pass is None or self._pass.grown else self._pass.branches
        return [each for each in branches if each.wanted.rows is rows]

    def leave_pages(self, rows: GrownRows | None) -> None:
        """Others may have the pages of rows from now on, so the pass that computed them there
        writes no more. Another sequence may have gone on in what it has grown, and counts on the
        leaves."""
        if self._has_grown(rows) and self._pass is not None:
            self._pass.trees.queue()

    def free(self, kv: BranchKv, rows: GrownRows) -> None:
        """Frees a branch, when the pass that writes to it ends."""
        if self._has_grown(rows) and self._pass is not None:
            self._pass.unneeded.append(kv)
        else:
            self._contexts.leases.drop_branch(kv.own)

    def give_up(self) -> None:
        """Leaves out what the pass under way has yet to compute."""
        if self._pass is None:
            return
        self._pass.trees.give_up()
        if not self._pass.grown:
            self._pass.unneeded.extend(each.kv for each in self._pass.branches)
        self._end(self._pass)

    def _begin(self) -> BranchPass | None:
        """Begins a pass for verdicts that are wanted; None where there are no pages for any."""
        wanted = self.wanted.take(self._trees.max_sequences)
        branches = [each for each in map(self._branch, wanted) if each is not None]
        if not branches:
            return None
        rows = [
            self._contexts.branch_sequence(
                each.wanted.plan.sequence, each.kv, each.wanted.verdict.token
            )
            for each in branches
        ]
        num_choices = self._num_choices(branches[0].wanted.plan.shape)
        trees = self._trees.begin([each.wanted for each in branches], rows, num_choices)
        return BranchPass(trees, branches)

    def _branch(self, wanted: Wanted) -> GrowingBranch | None:
        behind = None if wanted.behind is None else wanted.behind.kv
        sequence, path = wanted.plan.sequence, wanted.rows.line(wanted.accepted)
        num_rows = self._trees.num_branch_rows(wanted.plan.shape)
        kv = self._contexts.branch(sequence, behind, path, num_rows)
        if kv is None and behind is None and self._make_room():
            kv = self._contexts.branch(sequence, behind, path, num_rows)
        return None if kv is None else GrowingBranch(wanted, kv)

    def _grown(self, growing: BranchPass) -> list[tuple[GrowingBranch, GrownRows]]:
        is_left = growing.trees.run_on()
        growing.grown = list(map(GrownRows, growing.trees.read()))
        self._pass = growing if is_left else None
        return list(zip(growing.branches, growing.grown, strict=True))

    def _end(self, growing: BranchPass) -> None:
        """A pass writes no more."""
        self._pass = None
        for kv in growing.unneeded:
            self._contexts.leases.drop_branch(kv.own)

    def _has_grown(self, rows: GrownRows | None) -> bool:
        return self._pass is not None and any(each is rows for each in self._pass.grown)
