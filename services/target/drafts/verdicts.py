"""The verdict on a committed round: counted, learnt from, sent, and answered. No torch."""

from __future__ import annotations

from services.target.drafts.assignments import Assignment, Assignments
from services.target.drafts.attachment import DraftRegistry
from services.target.sequence import Sequence
from services.target.step_report import RecentOutcomes, SpeculationCounts
from shared.generation import DraftAnswer


class Verdicts:
    """Hands out verdicts to the drafts whose sequences have stepped. Owned by the engine thread.

    For each round: `answer` and `count_round`, then `decided` or, at the sequence's end, its close.

    Attributes:
        counts: rounds without a tree, and of trials, since they were last taken.
    """

    def __init__(
        self, drafts: DraftRegistry, assignments: Assignments, outcomes: RecentOutcomes
    ) -> None:
        self._drafts = drafts
        self._assignments = assignments
        self._outcomes = outcomes
        self.counts = SpeculationCounts()

    def take_counts(self) -> SpeculationCounts:
        """Returns the counts since the last call."""
        counts, self.counts = self.counts, SpeculationCounts()
        return counts

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
        counters = assignment.attachment.counters
        if was_verified:
            counters.num_verified_rounds += 1
            counters.num_accepted += num_accepted
        elif assignment.is_missed:
            counters.num_missed_rounds += 1
            assignment.attachment.timeout.missed(now_s)
            sequence.stats.num_missed_rounds += 1

    def decided(
        self,
        sequence: Sequence,
        committed_token_ids: tuple[int, ...],
        accepted_node_indices: tuple[int, ...],
        *,
        was_verified: bool,
        since_s: float | None,
        now_s: float,
    ) -> None:
        """Queues the verdict on a committed round, and selects the candidate pushed ahead for it.

        `sequence.round` is the next round already.

        Args:
            accepted_node_indices: into `Assignments.candidate_tree`.
            since_s: when the round before was decided; None for the first one.
        """
        round_s = None if since_s is None else now_s - since_s
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            self._learn_without(sequence, len(committed_token_ids), round_s)
            return
        attachment, was_prepared = assignment.attachment, assignment.has_pushed
        drafted = assignment.as_drafted(accepted_node_indices) if was_verified else ()
        self._learn(
            assignment,
            len(committed_token_ids),
            len(drafted) if was_verified else None,
            round_s,
            now_s,
        )
        verdict, foreseen = assignment.decide(
            committed_token_ids, drafted, was_verified=was_verified
        )
        attachment.outbox_verdicts.append(verdict)
        if was_verified:
            position = len(accepted_node_indices)
            self._outcomes.count(attachment.outcomes, position, foreseen, was_prepared=was_prepared)
        _begin_wait(assignment, now_s)

    def _learn_without(self, sequence: Sequence, num_committed: int, round_s: float | None) -> None:
        """Learns from a round of a sequence that no draft has."""
        policies = self._drafts.policies
        if round_s is None or sequence.request.speculation_disabled or not policies:
            return
        self.counts.num_paused_rounds += 1
        for policy in policies:
            policy.saw_round(None, num_committed, round_s, has_tree=False)

    def _learn(
        self,
        assignment: Assignment,
        num_committed: int,
        num_accepted: int | None,
        round_s: float | None,
        now_s: float,
    ) -> None:
        """Learns from a round of a sequence that a draft has.

        Args:
            num_accepted: None where no tree of the draft was verified.
        """
        policy = assignment.attachment.policy
        self.counts.num_paused_rounds += assignment.asked.is_paused
        self.counts.num_probe_rounds += policy.is_trying
        is_whole = assignment.sequence.request.num_draft_tokens is None
        if num_accepted is not None and is_whole:
            policy.saw_accepted(assignment.shape, num_accepted)
        if assignment.is_bound:
            return
        has_tree, is_paused = num_accepted is not None, assignment.asked.is_paused
        if is_paused:
            is_excused = has_tree  # pushed before it was known that none is wanted
        else:
            is_excused = assignment.is_excused and not has_tree and assignment.is_moved
        if is_excused or round_s is None or assignment.was_warming(now_s):
            policy.saw_excused(num_committed)
        else:
            policy.saw_round(assignment.choice, num_committed, round_s, has_tree=has_tree)


def _begin_wait(assignment: Assignment, now_s: float) -> None:
    """The draft is asked for the next round's tree, unless that is here already."""
    timeout, has_tree = assignment.attachment.timeout, assignment.candidate is not None
    assignment.asked_s = now_s
    assignment.heard_s = now_s if has_tree else None
    if has_tree:
        timeout.in_time()
    is_reading = assignment.num_asked <= 1 or not (
        assignment.num_heard or assignment.attachment.policy.is_always_on
    )
    is_late = is_reading or assignment.attachment.warm_up.is_on(now_s)
    assignment.is_excused = not has_tree and is_late
    if assignment.is_excused or assignment.asked.is_paused:
        assignment.deadline_s = now_s
    else:
        assignment.deadline_s = timeout.deadline_s(now_s)
