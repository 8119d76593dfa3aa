"""Grows trees in one pass of the device, those for the verdicts to come as well.

Each likely verdict gets a *branch*: pages of its own behind those that all branches of a sequence
share, holding the keys and values of the nodes that the verdict would accept. In it the bonus token
is computed and a tree grown from it, as if the verdict had fallen. When it falls the sequence goes
on in its branch, where everything is computed: nothing is moved, and the trees for the verdicts on
the tree that is verified now can be begun at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.draft.drafters.drafter import Proposal
from services.draft.drafters.grown_rows import GrownRows, Path, paths_of
from services.draft.drafters.standalone_contexts import StandaloneContexts
from services.draft.drafters.standalone_trees import StandaloneTrees
from services.draft.drafters.whole_trees import grown_shape
from services.draft.fan_out import FanOut
from services.draft.likely_verdicts import LikelyVerdict, likely_verdicts, rank_of
from services.draft.rank_shares import RankShares
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.leases import KvBranch
from shared.runtime.open_sequence import OpenSequence
from shared.tokens import TokenTree, TreeShape


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A verdict on a sequence's tree that gets a branch.

    Attributes:
        path: tokens of the nodes that it accepts.
        shape: of the tree to grow.
    """

    sequence: DraftSequence
    verdict: LikelyVerdict
    path: Path
    shape: TreeShape


@dataclass(frozen=True, slots=True)
class Branch:
    """What is computed for a verdict."""

    kv: KvBranch
    rows: GrownRows


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
        self._wanted: dict[SequenceKey, list[_Wanted]] = {}
        self._branches: dict[SequenceKey, dict[Path, Branch]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._wanted)

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
            _Wanted(sequence, each, paths[each.place], shape) for each in verdicts
        ]

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """A branch has its tree already, or none that could be gone on with."""
        return False

    def decide(self, sequence: DraftSequence, token_ids: Sequence[int]) -> Branch | None:
        """A verdict has fallen. Returns what was computed for it, whose pages the caller takes
        over; frees the pages of the others.

        Args:
            token_ids: what it commits.
        """
        key, path = sequence.key, tuple(token_ids)
        rows = self._rows.pop(key, None)
        if rows is not None:
            for depth, token in enumerate(path):
                found = rows.after(path[:depth])
                if not found:
                    break
                self._shares.observe(rank_of(found, token))
        branch = self._branches.get(key, {}).pop(path, None)
        self.drop(sequence)
        if branch is not None:
            self._rows[key] = branch.rows
        return branch

    def drop(self, sequence: DraftSequence) -> None:
        """Forgets a sequence and frees its branches."""
        self._rows.pop(sequence.key, None)
        self._wanted.pop(sequence.key, None)
        for branch in self._branches.pop(sequence.key, {}).values():
            self._contexts.leases.drop_branch(branch.kv)

    def free(self) -> bool:
        """Gives up all branches because memory is short; returns whether there were any."""
        held = [branch for each in self._branches.values() for branch in each.values()]
        for branch in held:
            self._contexts.leases.drop_branch(branch.kv)
        self._branches.clear()
        self._wanted.clear()
        return bool(held)

    def advance(self) -> list[Proposal]:
        """Computes one pass."""
        batch = self._next_batch()
        found = [(each, self._branch(each)) for each in batch]
        placed = [(each, branch) for each, branch in found if branch is not None]
        if not placed:
            return []
        shape = placed[0][0].shape
        grown = self._trees.grow_behind(
            [self._open(*each) for each in placed], shape, self._num_choices(shape)
        )
        proposals: list[Proposal] = []
        for (wanted, kv), rows in zip(placed, grown, strict=True):
            branches = self._branches.setdefault(wanted.sequence.key, {})
            branches[*wanted.path, wanted.verdict.token] = Branch(kv, rows)
            proposals.append(Proposal(wanted.sequence, rows.tree, wanted.verdict.condition))
        return proposals

    def _num_choices(self, shape: TreeShape) -> int:
        """Returns how many tokens to find after each node: a verdict ends in one that its tree does
        not hold."""
        return max(shape.topk + 1, self.budget) if self.budget else 0

    def _next_batch(self) -> list[_Wanted]:
        """Takes verdicts whose trees have one shape, as many as a pass grows."""
        batch: list[_Wanted] = []
        for key, wanted in list(self._wanted.items()):
            room = self._trees.max_sequences - len(batch)
            if batch and wanted[0].shape != batch[0].shape:
                continue
            batch += wanted[:room]
            if len(wanted) > room:
                self._wanted[key] = wanted[room:]
                break
            del self._wanted[key]
        return batch

    def _branch(self, wanted: _Wanted) -> KvBranch | None:
        rows, shape = self._rows[wanted.sequence.key], wanted.shape
        num_rows = 1 + shape.num_steps * shape.topk
        return self._contexts.branch(wanted.sequence, rows.line(wanted.path), num_rows)

    def _open(self, wanted: _Wanted, branch: KvBranch) -> OpenSequence:
        return self._contexts.branch_sequence(
            wanted.sequence, branch, len(wanted.path), wanted.verdict.token
        )
