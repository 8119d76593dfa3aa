"""What decoding takes, as measured: steps, waits, and how far estimates are off. No torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from services.target.control.averages import Typical
from services.target.control.course import Course
from services.target.control.goodput import Device, Part, WaitTime, cycle
from services.target.control.step_times import StepTimes
from services.target.drafts.attachment import Attachment
from services.target.step_report import StepReport

MIN_CYCLES = 2.0
LARGEST_STRETCH = 4.0
LATENESS = 1.25
"""A tree is late beyond this many times its usual wait."""


@dataclass(frozen=True, slots=True)
class _Window:
    """A while in which one choice was in force.

    Attributes:
        num_rounds: drafted rounds before it.
        num_drafted: sequences that were drafted for.
        expected_s: for a cycle, in which each of them has a round.
    """

    start_s: float
    num_rounds: int
    num_drafted: int
    expected_s: float


class DecodeCosts:
    """Estimates of one target.

    Attributes:
        step_times: of decode steps beside which no draft computes.
        num_rounds: drafted rounds so far; counted by the owner.
        sizes: sequences each draft works for, by attachment.
    """

    def __init__(self) -> None:
        self.step_times = StepTimes()
        self.num_rounds = 0
        self.sizes: dict[str, int] = {}
        self._stretch = Typical()
        self._window: _Window | None = None

    @property
    def are_known(self) -> bool:
        """Whether a step was measured yet."""
        return bool(self.step_times.measured())

    @property
    def device(self) -> Device:
        """What a choice is weighed by."""
        stretch = self._stretch.value if self._stretch.is_steady else 1.0
        return Device(self.step_times, self.step_times.slowdown, max(stretch, 1.0))

    def observe_step(self, num_rows: int, duration_s: float, *, is_quiet: bool) -> None:
        """Takes in a step without prompts.

        Args:
            is_quiet: no draft computed meanwhile, perhaps on the same device.
        """
        self.step_times.observe(num_rows, duration_s, is_quiet=is_quiet)

    def plain_s(self, num_tokens: int, num_sequences: int) -> float:
        """Returns how long plain decoding usually takes for tokens, each its share of a plain step
        of the batch; 0 before any step was measured."""
        return num_tokens * self.step_times.at_usual_pace(num_sequences) / num_sequences

    def is_cold(self, report: StepReport) -> bool:
        """Whether a step with trees may be a cold start, because few of its width were seen."""
        return report.num_drafted > 0 and not self.step_times.is_sure(report.num_rows)

    def observe_wait(self, course: Course, heard_s: float, *, is_foreseen: bool = False) -> None:
        """Takes in the arrival of a tree that was asked for; one that is here before the verdict
        goes out was not waited for.

        Args:
            is_foreseen: it was drafted ahead of the verdict.
        """
        if course.told_s is None or course.expects_nothing:
            return
        told_s = heard_s if course.is_untold else course.told_s
        if course.was_warming(told_s, heard_s):
            return
        attachment = course.attachment
        attachment.turnarounds.observe(
            course.shape.num_steps,
            self._size(attachment),
            max(heard_s - told_s, 0.0),
            attachment.report.draft_s,
            is_foreseen=is_foreseen,
            is_ahead=course.asked.num_outcomes != 0,
        )

    def wait_time(self, attachment: Attachment) -> WaitTime:
        """Returns how long a draft makes sequences wait."""
        fan_out = attachment.fan_out
        is_ahead = fan_out is None or fan_out.budget != 0
        return functools.partial(attachment.turnarounds, is_ahead=is_ahead)

    def usual_wait_s(self, course: Course) -> float:
        """Returns how long the tree that a sequence asked for usually takes."""
        wait_s = self.wait_time(course.attachment)
        return wait_s(course.shape.num_steps, self._size(course.attachment))

    def is_known(self, course: Course) -> bool:
        """Whether the draft of a sequence has answered often enough to be judged."""
        return course.attachment.turnarounds.is_known

    def gathering_until_s(
        self, ready: SequenceOf[Course], late: SequenceOf[Course], now_s: float
    ) -> float:
        """Returns until when to hold a step back for trees that are usually here by then.

        One step for all saves what two would take more, which is the longest wait. Without this,
        sequences that fell out of step would stay so.
        """
        if not late:
            return -math.inf
        expected_s = max(
            math.inf if each.told_s is None else each.told_s + LATENESS * self.usual_wait_s(each)
            for each in late
        )
        num_ready, num_late = _num_rows(ready), _num_rows(late)
        step_s = self.step_times
        saved_s = step_s(num_ready) + step_s(num_late) - step_s(num_ready + num_late)
        return expected_s if expected_s <= now_s + saved_s else -math.inf

    def open_window(self, parts: SequenceOf[Part], num_drafted: int, now_s: float) -> None:
        """Begins to compare what a choice takes with what is expected of it."""
        device = self.device
        expected_s = cycle(parts, device.step_s, device.slowdown).duration_s
        self._window = _Window(now_s, self.num_rounds, num_drafted, expected_s)

    def close_window(self, now_s: float, *, is_whole: bool) -> None:
        """Ends the comparison, if one was begun.

        Args:
            is_whole: False forgets it, because sequences came or went.
        """
        window, self._window = self._window, None
        if window is None or not is_whole:
            return
        num_cycles = (self.num_rounds - window.num_rounds) / window.num_drafted
        if num_cycles >= MIN_CYCLES and window.expected_s > 0:
            ratio = (now_s - window.start_s) / num_cycles / window.expected_s
            self._stretch.add(min(max(ratio, 1 / LARGEST_STRETCH), LARGEST_STRETCH))

    def _size(self, attachment: Attachment) -> int:
        return self.sizes.get(attachment.identity.attachment_id, 1)


def _num_rows(courses: SequenceOf[Course]) -> int:
    """Rows that a step over these sequences has, if their trees are what they usually are."""
    return sum(each.num_rows(each.shape) for each in courses)
