"""Figures of one step of the engine: what it computed, the verdicts that drafts foresaw, and how
long the device idled before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shared.tokens import Choice, TreeShape

# Counts the verdicts that drafts foresaw, by position and rank. No torch.
#
# *Position* is how many nodes of the tree were accepted, *rank* the place of the matching candidate
# among those pushed for the same node. Both tell a controller where fan-out pays.


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


Clock = Callable[[], float]
"""Returns seconds since a fixed moment; never goes back."""


class HostGap:
    """Measures from the read that emptied the device to the next launch."""

    def __init__(self) -> None:
        self._idle_since_s: float | None = None

    def read(self, now_s: float) -> None:
        """The last launched step was read: the device has nothing left."""
        self._idle_since_s = now_s

    def wait(self) -> None:
        """There is nothing to launch, which is not the host's fault."""
        self._idle_since_s = None

    def launched(self, now_s: float) -> float:
        """Returns the gap before this launch in seconds; 0 when the device still had work."""
        since_s, self._idle_since_s = self._idle_since_s, None
        return 0.0 if since_s is None else now_s - since_s


@dataclass(slots=True)
class SpeculationCounts:
    """Rounds since the counts were taken.

    Attributes:
        num_paused_rounds: without a tree, because plain steps are faster or are tried.
        num_probe_rounds: of trials.
    """

    num_paused_rounds: int = 0
    num_probe_rounds: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one step.

    Attributes:
        duration_s: from its plan, or from the commit of the step before if that was later, to its
            commit.
        end_s: when it was committed, by the engine's clock.
        host_gap_s: how long the device had nothing to do before it because of the host: from
            reading the step before to launching this one; 0 when it was launched earlier.
        num_rows: rows of the forward.
        num_prompt_rows: rows of sequences that had more than one token to compute.
        num_rounds: sequences that drew tokens.
        num_committed: tokens committed.
        num_drafted: draft nodes verified.
        num_accepted: draft nodes accepted.
        num_preempted: sequences that lost their pages.
        outcomes: how drafts foresaw the verdicts of the step, and which of their trees came late
            for the one before.
        num_discarded: sequences that had ended when the step was read; their rows were for nothing.
        speculation: rounds since the report before.
        num_fallback_rounds: of `num_rounds`, those with a tree of the target's own.
        num_fallback_committed: tokens that these committed, bonus included.
        round_shape: of the trees where the step was a round on the device; else None.
    """

    duration_s: float
    end_s: float
    host_gap_s: float
    num_rows: int
    num_prompt_rows: int
    num_rounds: int
    num_committed: int
    num_drafted: int
    num_accepted: int
    num_preempted: int
    outcomes: OutcomeTally
    num_discarded: int
    speculation: SpeculationCounts
    round_shape: TreeShape | None = None
    num_fallback_rounds: int = 0
    num_fallback_committed: int = 0


def shape_name(shape: Choice) -> str:
    """Returns a shape as figures name it: steps, top-k and draft tokens, and `ahead` where trees
    grow ahead; `plain` without one."""
    if shape is None:
        return "plain"
    name = f"{shape.num_steps}_{shape.topk}_{shape.num_draft_tokens}"
    return f"{name}_ahead" if shape.is_ahead else name


def compared(rates: Mapping[Choice, float], num_sequences: int) -> str:
    """Returns the tokens a second of plain steps and of the best trees, in words."""
    trees = {shape: rate for shape, rate in rates.items() if shape is not None}
    best = max(trees, key=lambda shape: trees[shape], default=None)
    figures = [f"plain steps {rates[None]:,.0f} tokens/s"] if None in rates else []
    if best is not None:
        shape = f"{best.num_steps} deep, {best.topk} wide"
        figures.append(f"the best trees ({shape}) {trees[best]:,.0f} tokens/s")
    sequences = "1 sequence" if num_sequences == 1 else f"{num_sequences} sequences"
    return f"with {sequences}: {', '.join(figures)}"
