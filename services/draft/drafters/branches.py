"""Branches of sequences: what is computed for verdicts that may fall."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from services.draft.drafters.contexts import BranchKv
from services.draft.drafters.tails import Path, TailRows
from services.draft.likely_verdicts import (
    Continuation,
    FanOut,
    LikelyVerdict,
    RankShares,
    likely_verdicts,
    rank_of,
)
from services.draft.sequence import DraftSequence, SequenceKey
from shared.runtime.tree_pass import PassRows, PassTree
from shared.tokens import TokenTree, TreeShape


class GrownRows(TailRows):
    """What a pass has computed.

    Attributes:
        tree: the best nodes, whose rows are here but for the less likely leaves.
    """

    def __init__(self, grown: PassTree) -> None:
        super().__init__(grown.levels)
        self.tree = grown.tree
        self._rows = grown.rows

    def after(self, path: Path) -> Sequence[Continuation]:
        """Returns the best tokens after a node, best first; none after one that is not computed."""
        line = self._lines.get(path)
        return () if line is None else self._rows.after(line[-1] + 1 if line else 0)

    def row(self, path: Path) -> tuple[PassRows, int]:
        """Returns the row of a computed node among all that its pass computed."""
        line = self._lines[path]
        return self._rows, line[-1] + 1 if line else 0


def paths_of(tree: TokenTree) -> Iterator[Path]:
    """Yields the path of the last committed token, then of each node of a tree behind it."""
    paths: list[Path] = [()]
    yield ()
    for token, parent in zip(tree.token_ids, tree.parent_indices, strict=True):
        paths.append((*paths[0 if parent is None else parent + 1], token))
        yield paths[-1]


@dataclass(frozen=True, slots=True)
class Plan:
    """The lookahead plan for the verdicts on a sequence's trees.

    Attributes:
        shape: of the trees to grow.
    """

    sequence: DraftSequence
    shape: TreeShape
    fan_out: FanOut


@dataclass(frozen=True, slots=True)
class Wanted:
    """A verdict that gets a branch.

    Attributes:
        accepted: tokens of the nodes that it accepts.
        rows: of the tree that it is on.
        behind: the branch with that tree; None where the target verifies it already.
    """

    plan: Plan
    verdict: LikelyVerdict
    accepted: Path
    rows: GrownRows
    behind: Branch | None

    @property
    def path(self) -> Path:
        """The tokens that the verdict commits."""
        return (*self.accepted, self.verdict.token)


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """The rows computed ahead for one verdict.

    Attributes:
        shape: that its tree was grown in.
        followers: by the tokens that it commits, what is computed for a verdict on its tree.
    """

    verdict: LikelyVerdict
    kv: BranchKv
    rows: GrownRows
    shape: TreeShape
    followers: dict[Path, Branch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class GrowingBranch:
    """A branch whose tree the device is at work on."""

    wanted: Wanted
    kv: BranchKv


class WantedBranches:
    """Verdicts that get a branch when their turn comes, sequence by sequence."""

    def __init__(self) -> None:
        self._by_key: dict[SequenceKey, list[Wanted]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def want(self, key: SequenceKey, wanted: list[Wanted]) -> None:
        """Takes those of a sequence in place of any before."""
        self._by_key[key] = wanted

    def drop(self, key: SequenceKey) -> None:
        self._by_key.pop(key, None)

    def clear(self) -> None:
        self._by_key.clear()

    def take(self, count: int) -> list[Wanted]:
        """Takes verdicts whose trees have one shape, as many as a pass grows."""
        batch: list[Wanted] = []
        for key, wanted in list(self._by_key.items()):
            room = count - len(batch)
            if batch and wanted and wanted[0].plan.shape != batch[0].plan.shape:
                continue
            batch += wanted[:room]
            if len(wanted) > room:
                self._by_key[key] = wanted[room:]
                break
            del self._by_key[key]
        return batch


def all_of(branches: Iterable[Branch]) -> Iterator[Branch]:
    """Yields branches and what follows them."""
    for branch in branches:
        yield branch
        yield from all_of(branch.followers.values())


class LikelyBranches:
    """Chooses by what may follow the rows of a tree, and by how often the target has taken which of
    its choices."""

    def __init__(self) -> None:
        self._shares = RankShares()

    def wanted(
        self, plan: Plan, tree: TokenTree, rows: GrownRows, behind: Branch | None
    ) -> list[Wanted]:
        """Returns the likeliest verdicts on a tree, as many as the plan takes. Waits for the device
        to find what may follow its nodes.

        Args:
            behind: see `Wanted`.
        """
        paths = list(paths_of(tree))
        continuations = [rows.after(path) for path in paths]
        verdicts = likely_verdicts(tree, continuations, self._shares, plan.fan_out)
        return [Wanted(plan, each, paths[each.place], rows, behind) for each in verdicts]

    def observe(self, rows: GrownRows, path: Path) -> None:
        """Learns which of its choices the target took.

        Args:
            path: the tokens that a verdict commits.
        """
        for depth, token in enumerate(path):
            choices = rows.after(path[:depth])
            if not choices:
                return
            self._shares.observe(rank_of(choices, token))


def num_choices(shape: TreeShape, budget: int) -> int:
    """Returns how many tokens to find after each node: a verdict ends in one that its tree does not
    hold.

    Args:
        budget: verdicts to choose.
    """
    return max(shape.topk + 1, budget) if budget else 0
