"""Chooses the sequences that step now. No torch.

A sequence steps when its candidate is here, or when it is not worth waiting for any longer. Trees
that are here may be held back for a moment, so that one step verifies them with those to come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from services.target.drafts.assignment import Assignment
from services.target.drafts.assignments import Assignments
from services.target.drafts.draft_registry import DraftRegistry
from services.target.sequence import Sequence

GATHERING_RESPONSES = 1.5
"""How long trees wait for others, in response times of a draft."""


class Readiness:
    """Tracks the sequences that wait for trees, from one step to the next. Owned by the engine
    thread."""

    def __init__(self, drafts: DraftRegistry, assignments: Assignments) -> None:
        self._drafts = drafts
        self._assignments = assignments
        self._hold_until_s = -math.inf

    def judge(self, running: SequenceOf[Sequence], now_s: float) -> None:
        """A turn of the loop begins: decides what drafts are asked for, and moves sequences
        accordingly.

        Args:
            running: sequences that drafts may have.
        """
        if self._drafts.live:
            self.weigh(running, now_s)
            self._assignments.leave_silent(now_s)
            self._assignments.follow(running, now_s)
            self._assignments.move_one(self._waiting(running), now_s)

    def weigh(self, running: SequenceOf[Sequence], now_s: float) -> None:
        """Decides what drafts are asked for; a round on the device may be under way."""
        drafted = [each for each in running if not each.request.speculation_disabled]
        num_decoding = sum(each.num_uncomputed == 1 for each in drafted)
        for policy in self._drafts.policies:
            policy.turn(num_decoding, now_s, len(drafted) - num_decoding)

    def disregard(self) -> None:
        """The step under way captures graphs, so that its time says nothing."""
        for policy in self._drafts.policies:
            policy.disregard()

    def gather(self, sequences: Iterable[Sequence], now_s: float) -> bool:
        """Whether the trees that are here wait for others: most of the sequences cannot step yet,
        but soon. Half of them verify while the drafts work for the other half; smaller rounds read
        the weights more often. Sequences without a draft never wait."""
        self._hold_until_s = -math.inf
        late, number = list[Assignment](), 0
        for sequence in sequences:
            assignment = self._assignments.get(sequence.sequence_id)
            if assignment is None:
                return False
            number += 1
            if assignment.candidate is None and now_s < assignment.deadline_s:
                late.append(assignment)
        if 2 * len(late) <= number:
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

    def _waiting(self, running: SequenceOf[Sequence]) -> list[Assignment]:
        """Returns the places of the sequences that have a draft and no tree yet."""
        found = [self._assignments.get(sequence.sequence_id) for sequence in running]
        return [each for each in found if each is not None and each.candidate is None]


def _usual_s(late: Assignment) -> float:
    """Returns when a tree is here at the latest, as a rule."""
    if late.asked_s is None:
        return -math.inf
    return late.asked_s + GATHERING_RESPONSES * (late.attachment.timeout.response_s or 0.0)
