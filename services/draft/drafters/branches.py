"""Branches of sequences: what is computed for verdicts that may fall."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.draft.drafters.contexts import BranchKv
from services.draft.drafters.drafter import VerifiedTree
from services.draft.drafters.tails import GrownRows, Path
from services.draft.likely_verdicts import LikelyVerdict
from services.draft.sequence import SequenceKey
from shared.tokens import TreeShape


@dataclass(frozen=True, slots=True)
class Wanted:
    """A verdict that gets a branch.

    Attributes:
        verified: the tree that it is on, and the shape of the branch's.
        accepted: tokens of the nodes that it accepts.
        rows: of the tree that it is on.
        behind: the branch with that tree; None where the target verifies it already.
    """

    verified: VerifiedTree
    verdict: LikelyVerdict
    accepted: Path
    rows: GrownRows
    behind: Branch | None

    @property
    def path(self) -> Path:
        """The tokens that the verdict commits."""
        return (*self.accepted, self.verdict.token)

    @property
    def key(self) -> SequenceKey:
        return self.verified.sequence.key


@dataclass(slots=True, eq=False)
class Branch:
    """The rows computed ahead for one verdict.

    Attributes:
        grown: its tree's; None while the device is at work on it.
        followers: by the tokens that it commits, what is computed for a verdict on its tree.
    """

    wanted: Wanted
    kv: BranchKv
    grown: GrownRows | None = None
    followers: dict[Path, Branch] = field(default_factory=dict)

    @property
    def rows(self) -> GrownRows:
        """Those that have grown."""
        assert self.grown is not None
        return self.grown


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
            if batch and wanted and wanted[0].verified.shape != batch[0].verified.shape:
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


def num_choices(shape: TreeShape, budget: int) -> int:
    """Returns how many tokens to find after each node: a verdict ends in one that its tree does not
    hold.

    Args:
        budget: verdicts to choose.
    """
    return max(shape.topk + 1, budget) if budget else 0
