"""Figures of the engine: of one step (what it computed, the verdicts that drafts foresaw, and how
long the device was idle before it), and live ones. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shared.tokens import ShapeOrPlain, TreeShape


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A verdict for which a draft had pushed the next tree.

    Position and rank show where preparing several outcomes (fan-out) pays.

    Attributes:
        position: number of accepted nodes.
        rank: index of the matching candidate among those pushed for the same node.
    """

    position: int
    rank: int


@dataclass(slots=True)
class OutcomeTally:
    """Counts of verdicts on drafted trees.

    Attributes:
        hits: verdicts whose next tree had arrived before them, by (position, rank).
        misses: verdicts that none of the prepared trees fits, by position.
        num_late_hits: verdicts whose next tree had been pushed before them, but arrived later; they
            stay a miss or unprepared.
        num_unprepared: verdicts for which no tree had been pushed.
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
    def hit_rate(self) -> float:
        """Hits as a share of hits and misses, with one hit added; 1 before the first verdict."""
        return (self.num_hits + 1) / (self.num_hits + self.num_misses + 1)

    def count(self, position: int, foreseen: Foreseen | None, *, was_prepared: bool) -> None:
        """Counts one verdict on a drafted tree."""
        if foreseen is not None:
            self.hits[foreseen.position, foreseen.rank] += 1
        elif was_prepared:
            self.misses[position] += 1
        else:
            self.num_unprepared += 1

    def add(self, other: OutcomeTally) -> None:
        """Adds the counts of another tally."""
        self.hits.update(other.hits)
        self.misses.update(other.misses)
        self.num_late_hits += other.num_late_hits
        self.num_unprepared += other.num_unprepared


Clock = Callable[[], float]
"""Returns seconds since a fixed moment; never decreases."""


class HostGap:
    """Measures the time from the read of the last launched step to the next launch."""

    def __init__(self) -> None:
        self._idle_since_s: float | None = None

    def read(self, now_s: float) -> None:
        """The last launched step was read: the device is idle."""
        self._idle_since_s = now_s

    def wait(self) -> None:
        """There is nothing to launch, so the idle time is not a gap caused by the host."""
        self._idle_since_s = None

    def launched(self, now_s: float) -> float:
        """Returns the gap before this launch in seconds; 0 when the device still had work."""
        since_s, self._idle_since_s = self._idle_since_s, None
        return 0.0 if since_s is None else now_s - since_s


@dataclass(slots=True)
class SpeculationCounts:
    """Rounds since the counts were last taken.

    Attributes:
        num_paused_rounds: rounds without a tree, because plain steps are faster or are tried.
        num_probe_rounds: rounds of trials.
    """

    num_paused_rounds: int = 0
    num_probe_rounds: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one step.

    Attributes:
        duration_s: time from the step's plan, or from the commit of the step before if that was
            later, to the step's commit.
        end_s: time of the commit, by the engine's clock.
        host_gap_s: how long the device was idle before the step because of the host: from reading
            the step before to launching this one; 0 when this one was launched earlier.
        num_rows: rows of the forward.
        num_prompt_rows: rows of sequences that had more than one token to compute.
        num_rounds: sequences that drew tokens.
        num_committed: tokens committed.
        num_drafted: draft nodes verified.
        num_accepted: draft nodes accepted.
        num_preempted: sequences that lost their pages.
        outcomes: hits and misses of drafts in the step's verdicts, and trees that arrived late for
            the verdicts of the step before.
        num_discarded: sequences that had ended when the step was read; their rows were discarded.
        speculation: rounds since the last report.
        round_shape: tree shape of a round on the device; None for a planned step.
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


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Live figures. Free, cached and held pages add up to all pages.

    Attributes:
        num_drafted_for: running sequences for which trees are requested.
        num_paused: running sequences with a draft, for which no trees are requested.
        probe_s: time that probes and trials have cost beyond plain decoding.
        speculates: whether trees are requested of drafts; True also without drafts.
        round_shape: tree shape of the rounds on the device; None while there are none.
        round_s: usual round time, by tree shape (None for plain steps) and number of sequences.
    """

    num_waiting: int
    num_running: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_held_pages: int
    num_drafted_for: int
    num_paused: int
    probe_s: float
    speculates: bool
    round_shape: TreeShape | None
    round_s: Mapping[tuple[ShapeOrPlain, int], float]


def shape_name(shape: ShapeOrPlain) -> str:
    """Returns the name of a shape in figures: steps, top-k and draft tokens, and `ahead` if trees
    grow ahead; `plain` for None."""
    if shape is None:
        return "plain"
    name = f"{shape.num_steps}_{shape.topk}_{shape.num_draft_tokens}"
    return f"{name}_ahead" if shape.is_ahead else name
