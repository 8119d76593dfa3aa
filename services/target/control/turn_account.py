"""Tells the referee what each turn of the step loop did, and in how much time. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.target.control.course import Course
from services.target.control.decode_costs import DecodeCosts
from services.target.control.referee import Referee
from services.target.control.regime import Stance
from services.target.control.speed_window import SpeedWindow
from services.target.step_report import StepReport


class TurnAccount:
    """Adds up turns until one has stepped.

    Attributes:
        num_decoding: sequences that decode.
        is_cold: the turn may be a cold start.
    """

    def __init__(self, referee: Referee, costs: DecodeCosts) -> None:
        self.num_decoding = 0
        self._referee = referee
        self._costs = costs
        self._turn = SpeedWindow()
        self._ended_s: float | None = None
        self._began_s = 0.0
        self._has_stepped = False
        self._was_idle = False
        self.is_cold = False
        self._is_steady = True

    def wake(self, now_s: float, *, was_idle: bool = False) -> float:
        """Returns how long sequences have waited since the turn before; 0 if there were none, or if
        that turn stepped, so that the time went by on the way to the next one.

        Args:
            was_idle: the loop had nothing to do, whatever the turn before was.
        """
        ended_s, self._began_s = self._ended_s, now_s
        if ended_s is None or not self.num_decoding:
            return 0.0
        between_s = now_s - ended_s
        self._turn.elapsed_s += between_s
        return between_s if was_idle or self._was_idle else 0.0

    def skip(self) -> None:
        """A turn was a round's that is accounted for elsewhere, as is the step that was launched
        before it."""
        self._turn.clear()
        self._ended_s = None

    def judge(self, courses: SequenceOf[Course], num_decoding: int) -> None:
        """Has the referee decide, unless what runs is neither plain decoding nor the speculation
        that it decides on: where trees are fixed, few sequences want any, or a fan-out is tried.

        Args:
            courses: of the sequences that decode and have a draft.
        """
        free = [course for course in courses if course.fixed_wish is None]
        is_on = self._referee.stance is Stance.ON and not self._referee.is_settling
        is_tried = any(each.tries_fan_out for each in free)
        if is_tried or len(free) < len(courses) or (is_on and 2 * len(free) < num_decoding):
            self._referee.window.clear()
            return
        num_there = sum(self._costs.is_known(each) and not each.is_catching_up for each in free)
        self._referee.judge(
            num_decoding,
            self._costs.step_times(num_decoding),
            is_settled=self._referee.stance is not Stance.ON or 2 * num_there > num_decoding,
            may_end=self._is_steady,
        )

    def count(self, report: StepReport, duration_s: float, *, is_timed: bool) -> None:
        """Counts a step; of one that holds prompts whose time is not known yet, what it should take
        at least. The turn of one that may be a cold start is left out: how long it will take is not
        known, and what it should take at least would make speculation look better than it is.

        Args:
            is_timed: whether the duration was its time alone.
        """
        self._is_steady = is_timed and not report.num_prompt_rows
        self._has_stepped = True
        if not self.num_decoding:
            return
        turn, costs = self._turn, self._costs
        turn.plain_s += costs.plain_s(report.num_committed, self.num_decoding)
        turn.num_rounds += report.num_rounds
        is_unknown = self._referee.stance is Stance.ON and not self._referee.knows_prompts
        if report.num_prompt_rows and is_unknown:
            turn.elapsed_s -= max(duration_s - costs.step_times(report.num_rows), 0.0)
        elif report.num_prompt_rows:
            turn.num_prompt_rows += report.num_prompt_rows
        else:
            self.is_cold = self.is_cold or costs.is_cold(report)

    def end(self, now_s: float) -> None:
        """A turn ended, with or without a step: hands over what was done, with the time that was
        waited for it. The next one begins with it, unless `wake` says otherwise."""
        self._was_idle = not self._has_stepped
        self._turn.elapsed_s += now_s - self._began_s
        self._began_s = self._ended_s = now_s
        if self.num_decoding and not self._has_stepped:
            return
        if self.num_decoding and self.is_cold:
            self._referee.charge(self._turn)
        elif self.num_decoding and self._costs.step_times.are_sure:
            self._referee.window.add(self._turn)
        self._turn.clear()
        self._has_stepped = self.is_cold = False
