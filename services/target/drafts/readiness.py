"""Which sequences step now, and with how much of their trees. No torch.

A sequence steps when its candidate is here, or when it is not worth waiting for any longer. Trees
that are here may be held back for a moment, so that one step verifies them with those to come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from services.target.control.speculation_controller import SpeculationController
from services.target.control.tree_cuts import Ready
from services.target.drafts.assignment import Assignment
from services.target.drafts.assignments import Assignments
from services.target.drafts.draft_registry import DraftRegistry
from services.target.sequence import Sequence

GATHERING_RESPONSES = 1.5
"""How long trees wait for others, in response times of a draft."""


class Readiness:
    """Tracks the sequences that wait for trees, from one step to the next. Owned by the engine
    thread."""

    def __init__(
        self, drafts: DraftRegistry, assignments: Assignments, controller: SpeculationController
    ) -> None:
        self._drafts = drafts
        self._assignments = assignments
        self._controller = controller
        self._hold_until_s = -math.inf
        self._judged_s = -math.inf

    def judge(self, running: SequenceOf[Sequence], now_s: float) -> None:
        """A turn of the loop begins: decides whether speculation runs, and has sequences leave
        drafts that do not answer.

        Args:
            running: sequences that drafts may have.
        """
        self._controller.wake(now_s)
        self._assignments.leave_silent(now_s)
        if self.weigh(running, now_s):
            self._assignments.follow(running, now_s)

    def weigh(self, running: SequenceOf[Sequence], now_s: float) -> bool:
        """Has the controller decide whether speculation runs, with every sequence where it is: a
        round on the device may be under way. Returns whether there was anything to decide."""
        drafts = self._drafts.live
        if not (drafts and self._controller.is_adaptive):
            return False
        decoding = _decoding(running)
        courses = [each.course for each in self._held(decoding)]
        is_warming = any(each.warm_up.was_on(self._judged_s, now_s) for each in drafts)
        self._judged_s = now_s
        is_wanted = any(not each.request.speculation_disabled for each in decoding)
        self._controller.judge(courses, len(decoding), is_warming=is_warming, is_wanted=is_wanted)
        return True

    def prepare(self, running: SequenceOf[Sequence], now_s: float) -> None:
        """Before a step is planned: revises tree requests, and cuts trees that have arrived."""
        decoding = _decoding(running)
        held = self._held(decoding)
        self._hold_until_s = self._gathering_until_s(decoding, held, now_s)
        if now_s < self._hold_until_s:
            return
        self._cut(decoding, held, now_s)
        self._move(held, now_s)

    def prepare_round(self, running: SequenceOf[Sequence], now_s: float) -> None:
        """As `prepare`, for a round on the device: that verifies whole trees, and leaves out the
        sequences that wait for one."""
        decoding = _decoding(running)
        held = self._held(decoding)
        self._hold_until_s = -math.inf
        self._cut(decoding, held, now_s, is_whole=True)
        self._move(held, now_s)

    def gather(self, lanes: Iterable[Sequence], now_s: float) -> bool:
        """Whether the trees that are here wait for others: most of the lanes cannot step yet, but
        soon. Half of them verify while the drafts work for the other half; smaller rounds read the
        weights more often. Lanes without a draft never wait."""
        self._hold_until_s = -math.inf
        late, num_lanes = list[Assignment](), 0
        for sequence in lanes:
            assignment = self._assignments.get(sequence.sequence_id)
            if assignment is None:
                return False
            num_lanes += 1
            if assignment.candidate is None and now_s < assignment.deadline_s:
                late.append(assignment)
        if 2 * len(late) <= num_lanes:
            return False
        self._hold_until_s = max(map(_usual_s, late))
        return now_s < self._hold_until_s

    def is_ready(self, sequence: Sequence, now_s: float) -> bool:
        """Whether a sequence can step: it has its candidate and none is gathered with it, or none
        is waited for any more."""
        return now_s >= self.deadline_s(sequence)

    def deadline_s(self, sequence: Sequence) -> float:
        """Until when the sequence waits; long past when it waits for nothing."""
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            return -math.inf
        return assignment.deadline_s if assignment.candidate is None else self._hold_until_s

    def begin_rounds(self, sequences: Iterable[Sequence]) -> None:
        """A step begins that draws tokens of these sequences; their trees are chosen. Until the
        verdict, only what is pushed ahead is taken for them."""
        for sequence in sequences:
            assignment = self._assignments.get(sequence.sequence_id)
            if assignment is not None:
                assignment.is_stepping = True

    def _move(self, held: SequenceOf[Assignment], now_s: float) -> None:
        if self._drafts.num_kinds > 1:
            self._assignments.move_one(held, now_s)

    def _held(self, decoding: SequenceOf[Sequence]) -> list[Assignment]:
        """Returns the places of those that are at drafts."""
        found = [self._assignments.get(sequence.sequence_id) for sequence in decoding]
        return [assignment for assignment in found if assignment is not None]

    def _cut(
        self,
        decoding: SequenceOf[Sequence],
        held: SequenceOf[Assignment],
        now_s: float,
        *,
        is_whole: bool = False,
    ) -> None:
        """Has the controller revise what drafts are asked for, and cut the trees that are here."""
        ready = [
            (assignment, Ready(assignment.course, assignment.allowed_tree, heard_s, is_foreseen))
            for assignment in held
            if (candidate := assignment.candidate) is not None
            and (heard_s := assignment.heard_s) is not None
            for is_foreseen in (candidate.condition is not None,)
        ]
        cuts = self._controller.begin_step(
            [assignment.course for assignment in held],
            [each for _, each in ready],
            now_s,
            num_plain=len(decoding) - len(held),
            num_late=sum(each.is_late for each in held),
            num_stepping=sum(self.is_ready(sequence, now_s) for sequence in decoding),
            is_whole=is_whole,
        )
        for (assignment, _), kept in zip(ready, cuts, strict=True):
            assignment.cut(kept)

    def _gathering_until_s(
        self, decoding: SequenceOf[Sequence], held: SequenceOf[Assignment], now_s: float
    ) -> float:
        """Until when trees that are here wait for those that must come soon, so that one step
        verifies them all; long past when that does not pay. Plain sequences never wait."""
        if len(held) < len(decoding):
            return -math.inf
        ready = [each.course for each in held if each.candidate is not None]
        late = [each for each in held if each.candidate is None]
        if not ready or any(now_s >= each.deadline_s for each in late):
            return -math.inf
        return self._controller.gathering_until_s(ready, [each.course for each in late], now_s)


def _usual_s(late: Assignment) -> float:
    """Returns when a tree is here at the latest, as a rule."""
    if late.asked_s is None:
        return -math.inf
    return late.asked_s + GATHERING_RESPONSES * (late.attachment.timeout.response_s or 0.0)


def _decoding(running: Iterable[Sequence]) -> list[Sequence]:
    """Returns the sequences whose prompts are read."""
    return [sequence for sequence in running if sequence.num_uncomputed == 1]
