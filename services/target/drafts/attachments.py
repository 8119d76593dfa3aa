"""The attached drafts, their assignments and their candidates. No torch.

A draft is an accelerator: everything here may be late, stale, duplicated or gone, and the target
steps all the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from services.target.adaptive_config import AdaptiveConfig
from services.target.drafts.assignments import Assignment, Assignments
from services.target.drafts.attachment import Attachment, AttachmentStatus, DraftRegistry, Offer
from services.target.drafts.draft_policy import ALWAYS
from services.target.drafts.verdicts import Verdicts
from services.target.sequence import Sequence
from services.target.step_report import RecentOutcomes
from shared.candidate_columns import CandidateColumns, Run
from shared.tokens import TreeShape

# Chooses the sequences that step now. No torch.
#
# A sequence steps when its candidate is here, or when it is not worth waiting for any longer. Trees
# that are here may be held back for a moment, so that one step verifies them with those to come.

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


def _take(
    assignment: Assignment, columns: CandidateColumns, run: Run, place: int, now_s: float
) -> None:
    """Takes a candidate for the current round, whatever the last verdict was."""
    timeout = assignment.attachment.timeout
    is_current = assignment.fences(run)
    assignment.num_heard += 1
    if not is_current or assignment.is_stepping:
        assignment.attachment.counters.num_stale_candidates += 1
        assignment.stale_in_round = True
        if is_current:
            # The round went without it, but it came before the round's end: such a draft is worth
            # waiting for, and what follows the round's tokens there is of use.
            assignment.late = columns.candidate(place)
            timeout.heard(_response_s(assignment, now_s))
        return
    assignment.receive(columns.candidate(place), now_s)
    timeout.heard(_response_s(assignment, now_s))


def _response_s(assignment: Assignment, now_s: float) -> float | None:
    """Time since the verdict; None for a first tree, which waits for the prompt as well."""
    return None if assignment.num_heard == 1 else assignment.response_s(now_s)


class Attachments:
    """All that the engine does with drafts. Owned by the engine thread.

    Args:
        config: trees to choose from; None leaves a draft its own.
        always_up_to: sequences that want trees of every draft, whatever they bring.

    Attributes:
        drafts: who is attached.
        assignments: which sequence is at which draft, with which tree.
        readiness: says which sequences step now.
        verdicts: sends drafts the committed tokens.
        outcomes: how verdicts were foreseen.
    """

    def __init__(self, config: AdaptiveConfig | None = None, *, always_up_to: int = ALWAYS) -> None:
        self.outcomes = RecentOutcomes()
        self.drafts = DraftRegistry(config, always_up_to=always_up_to)
        self.assignments = Assignments(self.drafts)
        self.readiness = Readiness(self.drafts, self.assignments)
        self.verdicts = Verdicts(self.drafts, self.assignments, self.outcomes)

    @property
    def pays(self) -> bool | None:
        """Whether trees of any kind of draft are faster than plain steps; None while unknown."""
        known = [each.pays for each in self.drafts.policies if each.pays is not None]
        return any(known) if known else None

    def comparison(self) -> str:
        """Returns the figures behind `pays`."""
        known = [each for each in self.drafts.policies if each.pays is not None]
        return "; ".join(each.comparison() for each in known)

    def offer(self, offer: Offer) -> None:
        """Takes what a draft pushed; what is for another state than the current is dropped.

        A candidate is fenced by (sequence, round, committed tokens) and by belonging to a live
        attachment; only one that matches is ever verified.
        """
        attachment = self.drafts.get(offer.attachment_id)
        if attachment is None:
            return
        attachment.report = offer.report
        attachment.policy.is_pinned = offer.report.pinned_shape is not None
        attachment.warm_up.report(offer.arrived_s, is_warming=offer.report.is_warming)
        if attachment.warm_up.is_on(offer.arrived_s):
            self._wait_no_more(attachment, offer.arrived_s)
        if len(offer.candidates):
            attachment.timeout.stirred()
        for run in offer.candidates.runs():
            assignment = self.assignments.get(run.sequence_id)
            if assignment is None or assignment.attachment is not attachment:
                attachment.counters.num_stale_candidates += len(run.places)
            elif run.is_conditional:
                self._take_conditional(assignment, offer, run)
            else:
                for place in run.places:
                    _take(assignment, offer.candidates, run, place, offer.arrived_s)

    def _wait_no_more(self, attachment: Attachment, now_s: float) -> None:
        """A draft says that its trees will be late."""
        for assignment in self.assignments:
            if assignment.attachment is attachment and assignment.candidate is None:
                assignment.go_without(now_s)

    def _take_conditional(self, assignment: Assignment, offer: Offer, run: Run) -> None:
        """Keeps candidates for the verdicts that they name, unless one has fallen: then they are
        the current round's or nobody's."""
        attachment, columns = assignment.attachment, offer.candidates
        if assignment.fences(run):
            assignment.push(columns, run.places)
            return
        awaited = assignment.awaited(columns, run) if assignment.candidate is None else None
        attachment.counters.num_stale_candidates += len(run.places) - (awaited is not None)
        if awaited is not None:
            assignment.receive(columns.candidate(awaited), offer.arrived_s)
            attachment.timeout.heard(assignment.response_s(offer.arrived_s))
            self.outcomes.count_late_hit(attachment.outcomes)

    def attach(self, attachment: Attachment, sequences: Iterable[Sequence], now_s: float) -> None:
        """Adds a draft and hands it the running sequences that have none."""
        self.drafts.add(attachment)
        for sequence in sequences:
            self.assignments.assign(sequence, now_s)

    def detach(self, attachment_id: str, now_s: float) -> Attachment | None:
        """Removes a draft; its sequences move to others that have room, or go on alone."""
        attachment = self.drafts.remove(attachment_id)
        if attachment is not None:
            self.assignments.hand_over(attachment, now_s)
        return attachment

    def statuses(self) -> tuple[AttachmentStatus, ...]:
        """Returns the drafts, oldest first, with their tree requests."""
        return tuple(map(self._status, self.drafts.live))

    def _status(self, attachment: Attachment) -> AttachmentStatus:
        own = [each for each in self.assignments if each.attachment is attachment]
        counts = [count for each in own if (count := each.asked.num_outcomes) is not None]
        return AttachmentStatus(
            attachment,
            _wanted_shape(attachment, own),
            sum(each.asked.is_paused for each in own),
            tuple(attachment.policy.level_rates()),
            num_outcomes=max(counts, default=None),
        )


def _wanted_shape(attachment: Attachment, own: SequenceOf[Assignment]) -> TreeShape | None:
    """Returns the shape that most sequences ask for, or would; None while no tree is wanted."""
    pinned = attachment.report.pinned_shape
    if own:
        base = pinned or attachment.base_shape
        asked = [each.asked for each in own if not each.asked.is_paused]
        shapes = Counter(tree_request.shape or base for tree_request in asked)
        return shapes.most_common(1)[0][0] if shapes else None
    return pinned or attachment.policy.choice
