"""Grows trees in passes of the device, those for the verdicts to come as well.

Each likely verdict gets a *branch*: pages of its own behind those that all branches of a sequence
share, holding the keys and values of the nodes that the verdict would accept. In it the bonus token
is computed and a tree grown from it, as if the verdict had fallen. When it falls the sequence goes
on in its branch, where everything is computed: nothing is moved, and the trees for the verdicts on
the tree that is verified now can be begun at once.

A pass for verdicts to come stops after each forward, so that a verdict that arrives meanwhile is
heeded. If it is one of those that the pass is for, its tree is the current one when the pass ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.draft.drafters.branches import Branch, BranchPass, GrowingBranch, Wanted
from services.draft.drafters.drafter import Proposal
from services.draft.drafters.grown_rows import GrownRows, Path, paths_of
from services.draft.drafters.standalone_contexts import StandaloneContexts
from services.draft.drafters.standalone_trees import StandaloneTrees
from services.draft.drafters.whole_trees import grown_shape
from services.draft.fan_out import FanOut
from services.draft.likely_verdicts import likely_verdicts, rank_of
from services.draft.rank_shares import RankShares
from services.draft.sequence import DraftSequence, SequenceKey
from shared.tokens import TokenTree, TreeShape


class BranchDrafter:
    """See `Foresight`. For sequences that `grows_whole`."""

    def __init__(
        self, trees: StandaloneTrees, contexts: StandaloneContexts, *, vocab_size: int
    ) -> None:
        self.budget = 0
        self._trees = trees
        self._contexts = contexts
        self._vocab_size = vocab_size
        self._shares = RankShares()
        self._rows: dict[SequenceKey, GrownRows] = {}
        self._wanted: dict[SequenceKey, list[Wanted]] = {}
        self._pass: BranchPass | None = None
        self._fallen: dict[SequenceKey, GrowingBranch] = {}
        self._branches: dict[SequenceKey, dict[Path, Branch]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._wanted) or self._pass is not None

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Grows trees for the current round behind reserved sequences.

        Args:
            shape: see `grown_shape`.
        """
        grown = self._trees.grow(sequences, shape, self._num_choices(shape))
        for sequence, rows in zip(sequences, grown, strict=True):
            self.drop(sequence)
            self._rows[sequence.key] = rows
        return [
            Proposal(sequence, rows.tree) for sequence, rows in zip(sequences, grown, strict=True)
        ]

    def prepare_next(self, shape: TreeShape) -> bool:
        """Captures a graph that later passes may want; returns whether one was left."""
        return self._trees.capture_next(shape, self._num_choices(shape))

    def begin(
        self, sequence: DraftSequence, tree: TokenTree, shape: TreeShape, fan_out: FanOut
    ) -> None:
        rows = self._rows.get(sequence.key)
        if rows is None:
            return
        verdicts = likely_verdicts(tree, rows.by_node(tree), self._shares, fan_out)
        paths = list(paths_of(tree))
        shape = grown_shape(shape, self._vocab_size)
        self._wanted[sequence.key] = [
            Wanted(sequence, each, paths[each.place], shape) for each in verdicts
        ]

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """The tree may be among those that grow; there is nothing else to go on from."""
        return sequence.key in self._fallen

    def commit(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Takes a verdict, see `Drafter.commit`, and lets go of what was prepared for others.

        Args:
            token_ids: what it commits.
        """
        key, path = sequence.key, tuple(token_ids)
        rows = self._rows.get(key)
        if rows is not None:
            self._observe(rows, path)
        branch = self._branches.get(key, {}).pop(path, None)
        growing = None if rows is None else self._growing(rows, path)
        self.drop(sequence)
        if branch is not None:
            self._adopt(sequence, branch)
        elif growing is not None:
            self._fallen[key] = growing
        else:
            self._contexts.commit(sequence)

    def drop(self, sequence: DraftSequence) -> None:
        """Forgets a sequence and frees its branches; those that grow are freed when they end."""
        for kept in (self._rows, self._wanted, self._fallen):
            kept.pop(sequence.key, None)
        self._free(self._branches.pop(sequence.key, {}))

    def make_room(self) -> bool:
        """Gives up all branches because memory is short; returns whether there were any."""
        held = [branches for branches in self._branches.values() if branches]
        for branches in held:
            self._free(branches)
        self._branches.clear()
        self._wanted.clear()
        return bool(held)

    def advance(self) -> list[Proposal]:
        """Queues a forward of a pass, or takes what the last one has grown."""
        self._pass = self._pass or self._begin()
        if self._pass is None:
            return []
        if not self._is_of_use(self._pass):
            self._give_up(self._pass)
            return []
        self._pass.trees.advance()
        if self._pass.grown:
            self._pass = None
            return []
        return self._take_trees(self._pass) if self._pass.trees.has_trees else []

    def _take_trees(self, growing: BranchPass) -> list[Proposal]:
        is_left = growing.trees.run_on()
        growing.grown = list(map(GrownRows, growing.trees.read()))
        self._pass = growing if is_left else None
        taken = map(self._take, growing.branches, growing.grown)
        return [proposal for proposal in taken if proposal is not None]

    def _give_up(self, growing: BranchPass) -> None:
        """No verdict can fall any more that a pass is for."""
        growing.trees.give_up()
        if not growing.grown:
            for each in growing.branches:
                self._contexts.leases.drop_branch(each.kv)
        self._pass = None

    def _is_of_use(self, growing: BranchPass) -> bool:
        by_key = {each.wanted.sequence.key: each for each in growing.branches}
        return any(
            self._rows.get(key) in (each.behind, *growing.grown) or key in self._fallen
            for key, each in by_key.items()
        )

    def _begin(self) -> BranchPass | None:
        """Begins a pass for verdicts that are wanted; None where there are no pages for any."""
        branches = [each for each in map(self._branch, self._next_batch()) if each is not None]
        if not branches:
            return None
        shape = branches[0].wanted.shape
        rows = [
            self._contexts.branch_sequence(
                each.wanted.sequence, each.kv, len(each.wanted.accepted), each.wanted.verdict.token
            )
            for each in branches
        ]
        return BranchPass(self._trees.begin(rows, shape, self._num_choices(shape)), branches)

    def _next_batch(self) -> list[Wanted]:
        """Takes verdicts whose trees have one shape, as many as a pass grows."""
        batch: list[Wanted] = []
        for key, wanted in list(self._wanted.items()):
            room = self._trees.max_sequences - len(batch)
            if batch and wanted and wanted[0].shape != batch[0].shape:
                continue
            batch += wanted[:room]
            if len(wanted) > room:
                self._wanted[key] = wanted[room:]
                break
            del self._wanted[key]
        return batch

    def _branch(self, wanted: Wanted) -> GrowingBranch | None:
        sequence, shape = wanted.sequence, wanted.shape
        rows = self._rows[sequence.key]
        num_rows = 1 + shape.num_steps * shape.topk
        kv = self._contexts.branch(sequence, rows.line(wanted.accepted), num_rows)
        return None if kv is None else GrowingBranch(wanted, kv, rows)

    def _take(self, growing: GrowingBranch, rows: GrownRows) -> Proposal | None:
        """Keeps a branch that has grown, or goes on in it if its verdict has fallen."""
        wanted, branch = growing.wanted, Branch(growing.kv, rows)
        sequence, key = wanted.sequence, wanted.sequence.key
        if self._fallen.get(key) is growing:
            del self._fallen[key]
            self._adopt(sequence, branch)
            return Proposal(sequence, rows.tree)
        if self._rows.get(key) is growing.behind:
            self._branches.setdefault(key, {})[wanted.path] = branch
            return Proposal(sequence, rows.tree, wanted.verdict.condition)
        self._contexts.leases.drop_branch(growing.kv)
        return None

    def _adopt(self, sequence: DraftSequence, branch: Branch) -> None:
        self._contexts.adopt(sequence, branch.kv, branch.rows)
        self._rows[sequence.key] = branch.rows

    def _growing(self, behind: GrownRows, path: Path) -> GrowingBranch | None:
        """Returns the branch under way for a verdict on what was grown."""
        branches = () if self._pass is None else self._pass.branches
        found = (each for each in branches if each.behind is behind and each.wanted.path == path)
        return next(found, None)

    def _observe(self, rows: GrownRows, path: Path) -> None:
        """Learns which of its choices the target took."""
        for depth, token in enumerate(path):
            choices = rows.after(path[:depth])
            if not choices:
                return
            self._shares.observe(rank_of(choices, token))

    def _free(self, branches: Mapping[Path, Branch]) -> None:
        for branch in branches.values():
            self._contexts.leases.drop_branch(branch.kv)

    def _num_choices(self, shape: TreeShape) -> int:
        """Returns how many tokens to find after each node: a verdict ends in one that its tree does
        not hold."""
        return max(shape.topk + 1, self.budget) if self.budget else 0
