"""Branches of sequences: what is computed for verdicts that may fall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.draft.drafters.grown_rows import GrownRows, Path
from services.draft.likely_verdicts import LikelyVerdict
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvBranch
from shared.runtime.growing_trees import GrowingTrees
from shared.tokens import TreeShape


@dataclass(frozen=True, slots=True)
class Wanted:
    """A verdict on a sequence's tree that gets a branch.

    Attributes:
        accepted: tokens of the nodes that it accepts.
        shape: of the tree to grow.
    """

    sequence: DraftSequence
    verdict: LikelyVerdict
    accepted: Path
    shape: TreeShape

    @property
    def path(self) -> Path:
        """The tokens that the verdict commits."""
        return (*self.accepted, self.verdict.token)


@dataclass(frozen=True, slots=True)
class Branch:
    """What is computed for a verdict."""

    kv: KvBranch
    rows: GrownRows


@dataclass(frozen=True, slots=True, eq=False)
class GrowingBranch:
    """A branch whose tree the device is at work on.

    Attributes:
        behind: what was grown for the round that the verdict ends.
    """

    wanted: Wanted
    kv: KvBranch
    behind: GrownRows


@dataclass(slots=True)
class BranchPass:
    """One pass for several branches.

    Attributes:
        grown: by branch, once the trees are there; what may follow their nodes is yet to be found.
    """

    trees: GrowingTrees
    branches: Sequence[GrowingBranch]
    grown: Sequence[GrownRows] = ()
