"""Counts the verdicts that drafts foresaw, by position and rank. No torch.

*Position* is how many nodes of the tree were accepted, *rank* the place of the matching candidate
among those pushed for the same node. Both tell a controller where fan-out pays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A verdict that a draft had prepared for.

    Attributes:
        position: nodes accepted.
        rank: place among the candidates pushed for the same node, 0 for the first.
    """

    position: int
    rank: int


@dataclass(slots=True)
class OutcomeTally:
    """Counts of verdicts on drafted trees.

    Attributes:
        hits: verdicts whose next tree was here when they fell, by (position, rank).
        misses: verdicts for which the prepared trees did not fit, by position.
        num_late_hits: verdicts whose next tree had been pushed but came after them.
        num_unprepared: verdicts that nothing had been pushed for.
    """

    hits: Counter[tuple[int, int]] = field(default_factory=Counter)
    misses: Counter[int] = field(default_factory=Counter)
    num_late_hits: int = 0
    num_unprepared: int = 0

    @property
    def num_hits(self) -> int:
        return self.hits.total()

    @property
    def num_misses(self) -> int:
        return self.misses.total()

    @property
    def has_any(self) -> bool:
        """Whether anything was ever prepared for a verdict, in time or not."""
        return bool(self.hits or self.misses or self.num_late_hits)

    @property
    def is_all_hits(self) -> bool:
        """Whether there were verdicts, and the next tree of each was here."""
        return bool(self.hits) and not self.misses and not self.num_unprepared

    @property
    def hit_rate(self) -> float:
        """The share of verdicts that are foreseen, of those that are prepared for; 1 before any."""
        return (self.num_hits + 1) / (self.num_hits + self.num_misses + 1)

    def count(self, position: int, foreseen: Foreseen | None, *, was_prepared: bool) -> None:
        """Counts one verdict on a drafted tree."""
        if foreseen is not None:
            self.hits[foreseen.position, foreseen.rank] += 1
        elif was_prepared:
            self.misses[position] += 1
        else:
            self.num_unprepared += 1

    def count_late_hit(self) -> None:
        """A pushed candidate arrived after the verdict it is for; the miss or unprepared verdict
        stays counted as such."""
        self.num_late_hits += 1

    def add(self, other: OutcomeTally) -> None:
        """Adds the counts of another tally."""
        self.hits.update(other.hits)
        self.misses.update(other.misses)
        self.num_late_hits += other.num_late_hits
        self.num_unprepared += other.num_unprepared


class RecentOutcomes:
    """Counts what all drafts foresaw since it was last taken; each draft's own tally, over its
    life, is counted along."""

    def __init__(self) -> None:
        self._recent = OutcomeTally()

    def count(
        self,
        of_draft: OutcomeTally,
        position: int,
        foreseen: Foreseen | None,
        *,
        was_prepared: bool,
    ) -> None:
        """Counts one verdict on a tree of a draft."""
        for tally in (of_draft, self._recent):
            tally.count(position, foreseen, was_prepared=was_prepared)

    def count_late_hit(self, of_draft: OutcomeTally) -> None:
        """Counts a candidate of a draft that came after the verdict it is for."""
        for tally in (of_draft, self._recent):
            tally.count_late_hit()

    def take(self) -> OutcomeTally:
        """Returns the counts since the last call."""
        recent, self._recent = self._recent, OutcomeTally()
        return recent
