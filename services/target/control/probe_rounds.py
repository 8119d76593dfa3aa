"""Rounds that are drafted for only to learn, and what they cost. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from services.target.control.course import Course
from services.target.control.decode_costs import DecodeCosts
from services.target.control.probe_budget import ProbeBudget
from services.target.control.wishes import LARGEST_PROBE_STEPS

MOST_PER_PROBE = 4.0
"""A probe's round is charged at most this many times what one usually takes: a stall of the machine
is not its doing, and would forbid the next ones for long."""


@dataclass(frozen=True, slots=True)
class _Probed:
    """A probe's round that has ended.

    Attributes:
        told_s: when it began.
        num_told: tokens that all sequences had committed by then.
        dearest_s: most that it is charged.
    """

    told_s: float
    num_told: int
    dearest_s: float


class ProbeRounds:
    """Charges the rounds of sequences that are probed while others are drafted for."""

    def __init__(self, costs: DecodeCosts, budget: ProbeBudget) -> None:
        self._costs = costs
        self._budget = budget
        self._ended: list[_Probed] = []

    def end(self, course: Course, num_running: int) -> None:
        """A round of a sequence that is probed was decided."""
        # Before a draft is known it is its cold start, which comes once.
        if course.told_s is not None and self._costs.is_known(course):
            usual_s = self._costs.usual_wait_s(course)
            usual_s += self._costs.step_times(num_running + LARGEST_PROBE_STEPS)
            dearest_s = MOST_PER_PROBE * usual_s
            self._ended.append(_Probed(course.told_s, course.num_told, dearest_s))

    def pay(self, now_s: float, num_running: int, num_committed: int) -> None:
        """A probe costs the time of its round less that in which plain steps commit as much.

        Args:
            num_committed: tokens of all sequences so far.
        """
        plain_s = self._costs.step_times(num_running) / max(num_running, 1)
        for each in self._ended:
            saved_s = (num_committed - each.num_told) * plain_s
            self._budget.pay(min(now_s - each.told_s - saved_s, each.dearest_s))
        self._ended.clear()
