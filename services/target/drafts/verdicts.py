"""The verdict on a committed round: counted, learnt from, told, and answered. No torch."""

from __future__ import annotations

from dataclasses import replace

from services.target.control.speculation_controller import SpeculationController
from services.target.drafts.assignment import Assignment
from services.target.drafts.assignments import Assignments
from services.target.drafts.outcome_tally import RecentOutcomes
from services.target.fallback_order import FallbackOrder
from services.target.round_trace import DraftAnswer
from services.target.sequence import Sequence
from shared.tokens import TreeWish


class Verdicts:
    """Hands out verdicts to the drafts whose sequences have stepped. Owned by the engine thread.

    For each round: `answer` and `count_round`, then `decided` or, at the sequence's end, its close.
    """

    def __init__(
        self,
        assignments: Assignments,
        controller: SpeculationController,
        fallback_order: FallbackOrder,
        outcomes: RecentOutcomes,
    ) -> None:
        self._assignments = assignments
        self._controller = controller
        self._fallback_order = fallback_order
        self._outcomes = outcomes

    def answer(self, sequence: Sequence) -> DraftAnswer | None:
        """The draft that answered the sequence's current round, and its response time."""
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            return None
        response_s = None
        if assignment.heard_s is not None and assignment.asked_s is not None:
            response_s = assignment.heard_s - assignment.asked_s
        return DraftAnswer(assignment.attachment.identity.algorithm, response_s)

    def count_round(
        self, sequence: Sequence, num_accepted: int, *, was_verified: bool, now_s: float
    ) -> None:
        """Counts a round of a sequence, its last one included."""
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            return
        counters, course = assignment.attachment.counters, assignment.course
        if was_verified or not (assignment.was_warming(now_s) or course.expects_nothing):
            backoff = assignment.attachment.backoff
            backoff.count(now_s, assignment.waited_s, was_verified=was_verified)
        if was_verified:
            counters.num_verified_rounds += 1
            counters.num_accepted += num_accepted
        elif assignment.is_missed:
            counters.num_missed_rounds += 1
            assignment.attachment.timeout.missed(now_s, assignment.waited_s)
            sequence.stats.num_missed_rounds += 1

    def decided(
        self,
        sequence: Sequence,
        committed_token_ids: tuple[int, ...],
        accepted_node_indices: tuple[int, ...],
        *,
        was_verified: bool,
        now_s: float,
    ) -> None:
        """Queues the verdict on a committed round, and selects the candidate pushed ahead for it.

        `sequence.round` is the next round already.

        Args:
            accepted_node_indices: into `Assignments.candidate_tree`.
        """
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            return
        attachment, was_prepared = assignment.attachment, assignment.has_pushed
        drafted = assignment.as_drafted(accepted_node_indices) if was_verified else ()
        self._time(assignment, now_s, was_verified=was_verified)
        pays = self._pause(assignment, now_s) if self._may_pause(assignment) else None
        wish = self._learn(assignment, drafted, len(committed_token_ids), was_verified=was_verified)
        verdict, foreseen = assignment.decide(
            committed_token_ids, drafted, wish, was_verified=was_verified
        )
        attachment.outbox_verdicts.append(verdict)
        if was_verified:
            position = len(accepted_node_indices)
            self._outcomes.count(attachment.outcomes, position, foreseen, was_prepared=was_prepared)
        self._begin_wait(assignment, wish, now_s, pays=pays)

    def _time(self, assignment: Assignment, now_s: float, *, was_verified: bool) -> None:
        """Learns what rounds take, with the host's work for drafts: of those that waited in vain,
        nothing."""
        if assignment.asked_s is None:
            return
        if was_verified:
            self._fallback_order.took(now_s - assignment.asked_s)
        elif assignment.prefers_local or assignment.course.asked.is_paused:
            num_sequences = len(assignment.attachment.sequence_ids)
            self._fallback_order.took_plain(now_s - assignment.asked_s, num_sequences)

    def _may_pause(self, assignment: Assignment) -> bool:
        """Whether it is decided here; a controller that chooses tree requests pauses, too."""
        is_chosen = self._controller.is_adaptive and assignment.course.fixed_wish is None
        return self._fallback_order.may_pause and not is_chosen

    def _pause(self, assignment: Assignment, now_s: float) -> bool | None:
        """Decides whether a tree is wanted of a draft that may be of no use.

        Returns:
            Whether a tree is worth waiting for; None where one may be here already.
        """
        attachment, course = assignment.attachment, assignment.course
        timeout, backoff = attachment.timeout, attachment.backoff
        was_trying, is_on, pays = backoff.is_trying, backoff.goes_on(now_s), None
        if backoff.is_trying and not was_trying:
            timeout.doubt()
            self._fallback_order.doubt()
        if not is_on and not assignment.has_pushed:
            pays = self._pays(assignment)
            is_on = backoff.begins(
                now_s,
                len(attachment.sequence_ids),
                is_silent=timeout.is_cold,
                pays=pays or timeout.is_doubtful,
            )
        if is_on != course.wish.is_paused:
            course.wish = replace(course.wish, is_paused=is_on)
            if not is_on:
                assignment.num_heard = 0  # the next answer is late by what the draft catches up
        return False if is_on else pays

    def _pays(self, assignment: Assignment) -> bool:
        is_free = assignment.course.fixed_wish is None
        if is_free and self._controller.is_adaptive and not self._fallback_order.has_fallback:
            # Whether trees are worth their waits is measured: without them nothing could be.
            return True
        timeout = assignment.attachment.timeout
        return self._fallback_order.waits(
            assignment.sequence,
            timeout.usual_wait_s,
            timeout.answer_rate,
            num_sequences=len(assignment.attachment.sequence_ids),
        )

    def _begin_wait(
        self, assignment: Assignment, wish: TreeWish, now_s: float, *, pays: bool | None
    ) -> None:
        """The draft is asked for the next round's tree, unless that is here already."""
        timeout, backoff = assignment.attachment.timeout, assignment.attachment.backoff
        assignment.asked_s = now_s
        assignment.heard_s = None if assignment.candidate is None else now_s
        if assignment.candidate is not None:
            timeout.in_time()
        elif assignment.attachment.warm_up.is_on(now_s):
            assignment.go_without(now_s)
            return
        if backoff.is_trying:
            # The step of the first round after a backoff may be under way already.
            pays = not (wish.is_paused or assignment.course.is_catching_up)
        if assignment.candidate is None and pays is None:
            pays = self._pays(assignment)
        assignment.prefers_local = assignment.candidate is None and not pays
        if assignment.prefers_local or wish.is_paused:
            assignment.deadline_s = now_s
        elif backoff.is_trying:
            assignment.deadline_s = timeout.try_deadline_s(now_s, backoff.affordable_s)
        else:
            assignment.deadline_s = timeout.deadline_s(now_s)

    def _learn(
        self,
        assignment: Assignment,
        accepted: tuple[int, ...],
        num_committed: int,
        *,
        was_verified: bool,
    ) -> TreeWish:
        """Shows a round to the controller; returns the tree request for the next."""
        if was_verified and assignment.candidate is not None:
            tree, kept = assignment.candidate.tree, assignment.kept
            self._controller.observe_round(
                assignment.course,
                tree,
                range(len(tree)) if kept is None else kept.nodes,
                accepted,
                max_levels=assignment.sequence.num_remaining + num_committed - 1,
            )
        return self._controller.end_round(assignment.course, num_committed - 1)
