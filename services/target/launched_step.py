"""A step that is queued on the device: what it computes, and how its tokens will be read."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.target.draw import Decision, Draw
from services.target.prompt_scores import PromptScores
from services.target.sequence import Sequence
from services.target.step_plan import ScheduledSequence, StepPlan


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """One step between its launch and the commit of its tokens.

    Attributes:
        drawn: the scheduled sequences that draw, in the order of the draw's rows.
        draw: None when none does.
        scores: log probabilities of prompt tokens; None when no sequence wants any.
        num_rows: rows of the forward.
        start_s: when it was planned.
        allows_run_ahead: whether the next step can be launched before this one's tokens are read.
        host_gap_s: how long the device had nothing to do before, because of the host.
        retired: sequences that ended while the step was in flight. Their rows are thrown away,
            their pages stay theirs until it is read.
    """

    plan: StepPlan
    drawn: tuple[ScheduledSequence, ...]
    draw: Draw | None
    scores: PromptScores | None
    num_rows: int
    start_s: float
    allows_run_ahead: bool
    host_gap_s: float = 0.0
    retired: list[Sequence] = field(default_factory=list)

    @property
    def num_prompt_rows(self) -> int:
        """Rows of sequences that had more than one token to compute."""
        return sum(entry.num_rows for entry in self.plan.scheduled if entry.num_rows > 1)

    def computes(self, sequence: Sequence) -> bool:
        """Whether rows of `sequence` are in flight."""
        return any(entry.sequence is sequence for entry in self.plan.scheduled)

    def read(self) -> list[tuple[ScheduledSequence, Decision]]:
        """Waits for the device; returns what became of every sequence that drew."""
        decisions = [] if self.draw is None else self.draw.read()
        for entry in self.drawn:
            entry.sequence.num_pending -= 1
        return list(zip(self.drawn, decisions, strict=True))
