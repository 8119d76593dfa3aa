"""Takes the candidates that drafts push if they fit the current state; drops and counts the others.

A candidate is fenced by (sequence, round, committed tokens) and by belonging to a live attachment;
only one that matches is ever verified. No torch.
"""

from __future__ import annotations

from services.target.drafts.assignment import Assignment
from services.target.drafts.assignments import Assignments
from services.target.drafts.attachment import Attachment, Offer
from services.target.drafts.draft_registry import DraftRegistry
from services.target.drafts.outcome_tally import RecentOutcomes
from shared.candidate_columns import CandidateColumns, Run


class CandidateIntake:
    """Takes candidates for the sequences that are at drafts. Owned by the engine thread."""

    def __init__(
        self, drafts: DraftRegistry, assignments: Assignments, outcomes: RecentOutcomes
    ) -> None:
        self._drafts = drafts
        self._assignments = assignments
        self._outcomes = outcomes

    def offer(self, offer: Offer) -> None:
        """Takes what a draft pushed; what is for another state than the current is dropped."""
        attachment = self._drafts.get(offer.attachment_id)
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
            assignment = self._assignments.get(run.sequence_id)
            if assignment is None or assignment.attachment is not attachment:
                attachment.counters.num_stale_candidates += len(run.places)
            elif run.is_conditional:
                self._take_conditional(assignment, offer, run)
            else:
                for place in run.places:
                    _take(assignment, offer.candidates, run, place, offer.arrived_s)

    def _wait_no_more(self, attachment: Attachment, now_s: float) -> None:
        """A draft says that its trees will be late."""
        for assignment in self._assignments:
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
            self._outcomes.count_late_hit(attachment.outcomes)


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
