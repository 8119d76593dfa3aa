"""Reports the work and time of steps to the parts that learn from them or count them."""

from __future__ import annotations

from collections.abc import Callable

from services.target.clock import Clock
from services.target.drafts.attachments import Attachments
from services.target.step_commits import StepCommits
from services.target.step_report import StepReport

LONGEST_REST_S = 0.0005
"""Time for the event loop to send verdicts, and for a draft on the same slow processor to start on
them; less than any draft takes to answer."""


class StepAccount:
    """Ends turns of the loop. Owned by the engine thread.

    Args:
        commits: keeps the reports of a turn.
        attachments: whose controller learns from them.
        on_step: called with each.
        rest: waits at most so many seconds, while other threads have the interpreter.
    """

    def __init__(
        self,
        commits: StepCommits,
        attachments: Attachments,
        clock: Clock,
        on_step: Callable[[StepReport], None],
        rest: Callable[[float], None],
    ) -> None:
        self._commits = commits
        self._attachments = attachments
        self._clock = clock
        self._on_step = on_step
        self._rest = rest
        self._ended_s = 0.0

    def end(self, start_s: float, *, is_timed: bool, idle_s: float = 0.0) -> None:
        """A turn ends, with or without a step.

        Args:
            start_s: start of the committed step. While everyone is told of a round, the device
                may compute the next one already: that counts from the end of the turn before.
            is_timed: whether the time since then says how long the step took.
            idle_s: how long there is nothing to do behind the turn but to wait for drafts, which
                were told. What keeps the interpreter from the event loop then keeps the verdicts
                from the drafts, so this lets them go first.
        """
        reports, now_s = self._commits.take_reports(), self._clock()
        start_s = max(start_s, self._ended_s)
        rested_s = self._rested_s(idle_s) if reports and idle_s > 0.0 else None
        self._attachments.end_step(reports, start_s, now_s, is_timed=is_timed)
        if reports:
            self._ended_s = now_s
        for report in reports:
            self._on_step(report)
        if rested_s is not None:
            self._attachments.end_rest(rested_s)

    def _rested_s(self, idle_s: float) -> float:
        self._rest(min(idle_s, LONGEST_REST_S))
        return self._clock()

    def end_aside(self) -> None:
        """A turn ends that was a round's with a lent head, which is measured elsewhere."""
        self._attachments.controller.skip_turn()
        for report in self._commits.take_reports():
            self._on_step(report)
