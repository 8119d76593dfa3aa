"""The verdict on a committed round: counted, learnt from, told, and answered. No torch."""

from __future__ import annotations

from services.target.control.speculation_controller import SpeculationController
from services.target.drafts.assignment import Assignment
from services.target.drafts.assignments import Assignments
from services.target.drafts.outcome_tally import RecentOutcomes
from services.target.miss_ladder import MissLadder
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
        ladder: MissLadder,
        outcomes: RecentOutcomes,
    ) -> None:
        self._assignments = assignments
        self._controller = controller
        self._ladder = ladder
        self._outcomes = outcomes

    def answer(self, sequence: Sequence) -> DraftAnswer | None:
        """Who answered for the sequence's current round, and how fast."""
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
        counters = assignment.attachment.counters
        if was_verified:
            counters.num_verified_rounds += 1
            counters.num_accepted += num_accepted
        elif assignment.is_missed:
            counters.num_missed_rounds += 1
            waited_s = assignment.deadline_s - (assignment.asked_s or assignment.deadline_s)
            assignment.attachment.patience.missed(now_s, waited_s)
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
        """Hands out the verdict on a committed round, and selects what was pushed ahead for it.

        `sequence.round` is the next round already.

        Args:
            accepted_node_indices: into `Assignments.candidate_tree`.
        """
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            return
        attachment, was_prepared = assignment.attachment, assignment.has_pushed
        drafted = assignment.as_drafted(accepted_node_indices) if was_verified else ()
        wish = self._learn(assignment, drafted, len(committed_token_ids), was_verified=was_verified)
        verdict, foreseen = assignment.decide(
            committed_token_ids, drafted, wish, was_verified=was_verified
        )
        attachment.outbox_verdicts.append(verdict)
        if was_verified:
            position = len(accepted_node_indices)
            self._outcomes.count(attachment.outcomes, position, foreseen, was_prepared=was_prepared)
        self._begin_wait(assignment, wish, now_s)

    def _begin_wait(self, assignment: Assignment, wish: TreeWish, now_s: float) -> None:
        """The draft is asked for the next round's tree, unless that is here already."""
        patience = assignment.attachment.patience
        assignment.asked_s = now_s
        assignment.heard_s = None if assignment.candidate is None else now_s
        assignment.prefers_local = assignment.candidate is None and not self._ladder.waits(
            assignment.sequence, patience.usual_wait_s, patience.answer_rate
        )
        goes_on = assignment.prefers_local or wish.is_paused
        assignment.deadline_s = now_s if goes_on else patience.deadline_s(now_s)

    def _learn(
        self,
        assignment: Assignment,
        accepted: tuple[int, ...],
        num_committed: int,
        *,
        was_verified: bool,
    ) -> TreeWish:
        """Shows a round to the controller; returns what is wanted for the next."""
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
