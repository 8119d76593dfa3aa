"""Rounds whose verdicts go out with a turn of the loop: what was asked for, and when. No torch."""

from __future__ import annotations

from dataclasses import replace

from services.target.control.course import Course
from shared.tokens import TreeWish


class ToldRounds:
    """Keeps the rounds of a turn until everyone was told.

    Args:
        is_adaptive: whether drafts are asked for how many verdicts to prepare.
    """

    def __init__(self, *, is_adaptive: bool) -> None:
        self._is_adaptive = is_adaptive
        self._told: list[Course] = []

    def tell(self, course: Course, num_committed: int) -> TreeWish:
        """Moves a sequence on to its next round; returns what is wanted for that."""
        course.num_decided = None if course.expects_nothing else num_committed
        course.decided, course.asked = course.asked, self._with_fan_out(course)
        course.num_asked = 0 if course.wish.is_paused else course.num_asked + 1
        course.is_untold, course.is_heard = True, False
        self._told.append(course)
        return course.asked

    def end(self, now_s: float, num_committed: int) -> None:
        """Everyone was told.

        Args:
            num_committed: tokens of all sequences so far.
        """
        for course in self._told:
            if self._is_free(course):
                _observe_fan_out(course, now_s)
            course.told_s, course.is_untold, course.num_told = now_s, False, num_committed
        self._told.clear()

    def _with_fan_out(self, course: Course) -> TreeWish:
        """Returns what is wanted, with the number of verdicts to prepare for."""
        wish, fan_out = course.wish_of_request, course.attachment.fan_out
        if fan_out is None or wish.is_paused or not self._is_free(course):
            return wish
        return replace(wish, num_outcomes=fan_out.budget)

    def _is_free(self, course: Course) -> bool:
        """Whether its draft may be asked for another number of verdicts."""
        is_fixed = course.fixed_wish is not None or course.sequence.request.num_outcomes is not None
        return self._is_adaptive and not is_fixed


def _observe_fan_out(course: Course, now_s: float) -> None:
    fan_out = course.attachment.fan_out
    if fan_out is None or course.num_decided is None or course.told_s is None:
        return
    if course.was_warming(course.told_s, now_s):
        return
    fan_out.observe(course.decided.num_outcomes, course.num_decided, now_s - course.told_s)
