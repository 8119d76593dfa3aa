"""The verdict on a committed round: counts it, updates the policy, and sends it. No torch."""

from __future__ import annotations

from services.target.drafts.assignments import Assignment, Assignments
from services.target.drafts.attachment import DraftRegistry
from services.target.sequence import Sequence
from services.target.step_report import RecentOutcomes, SpeculationCounts
from shared.generation import DraftAnswer


class Verdicts:
    """Sends verdicts to the drafts whose sequences have stepped. Owned by the engine thread.

    For each round, `answer` and `count_round` are called, then `decided` unless the sequence ended.

    Attributes:
        counts: paused rounds and trial rounds since the last `take_counts`.
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
        """Returns the sequence's draft and its response time in the current round, if any."""
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            return None
        response_s = None
        if assignment.received_s is not None and assignment.verdict_s is not None:
            response_s = assignment.received_s - assignment.verdict_s
        return DraftAnswer(assignment.attachment.identity.algorithm, response_s)

    def count_round(
        self, sequence: Sequence, num_accepted: int, *, was_verified: bool, now_s: float
    ) -> None:
        """Counts a round of a sequence, also its last one."""
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
            accepted_node_indices: indices into `Assignments.candidate_tree`.
            since_s: time of the verdict on the previous round; None for the first one.
        """
        round_s = None if since_s is None else now_s - since_s
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            self._observe_undrafted(sequence, len(committed_token_ids), round_s)
            return
        attachment, was_prepared = assignment.attachment, assignment.has_pushed
        accepted = assignment.as_drafted(accepted_node_indices) if was_verified else ()
        num_accepted = len(accepted) if was_verified else None
        self._observe(assignment, len(committed_token_ids), num_accepted, round_s, now_s)
        verdict, foreseen = assignment.decide(
            committed_token_ids, accepted, was_verified=was_verified
        )
        attachment.outbox_verdicts.append(verdict)
        if was_verified:
            position = len(accepted_node_indices)
            self._outcomes.count(attachment.outcomes, position, foreseen, was_prepared=was_prepared)
        _begin_wait(assignment, now_s)

    def _observe_undrafted(
        self, sequence: Sequence, num_committed: int, round_s: float | None
    ) -> None:
        """Updates the policies with a round of a sequence that has no draft."""
        policies = self._drafts.policies
        if round_s is None or sequence.request.speculation_disabled or not policies:
            return
        self.counts.num_paused_rounds += 1
        began_with_draft = sequence.left_draft_in == sequence.round - 1
        for policy in policies:
            if began_with_draft:  # it may have waited for a tree
                policy.observe_excused(num_committed)
            else:
                policy.observe_round(None, num_committed, round_s, has_tree=False)

    def _observe(
        self,
        assignment: Assignment,
        num_committed: int,
        num_accepted: int | None,
        round_s: float | None,
        now_s: float,
    ) -> None:
        """Updates the policy with a round of a sequence that has a draft.

        Args:
            num_accepted: accepted nodes; None where no tree of the draft was verified.
        """
        policy, is_paused = assignment.attachment.policy, assignment.requested.is_paused
        self.counts.num_paused_rounds += is_paused
        self.counts.num_probe_rounds += policy.is_trying
        is_whole = assignment.sequence.request.num_draft_tokens is None
        if num_accepted is not None and is_whole:
            policy.observe_accepted(assignment.shape, num_accepted)
        if assignment.has_fixed_depth:
            return
        has_tree = num_accepted is not None
        if is_paused:
            is_excused = has_tree  # the draft pushed it before it knew that no tree is wanted
        else:
            # Instead of plain steps, trees are tried until a silent draft sends some.
            is_tried = policy.is_trying and policy.choice is None
            is_silent = is_tried and not assignment.has_waited
            is_excused = not has_tree and (assignment.is_excused or is_silent)
        if is_excused or round_s is None or assignment.was_warming(now_s):
            policy.observe_excused(num_committed)
        else:
            # A draft that prepares for the requested shape sends trees of another one.
            choice = assignment.shape if has_tree else assignment.choice
            policy.observe_round(choice, num_committed, round_s, has_tree=has_tree)


def _begin_wait(assignment: Assignment, now_s: float) -> None:
    """Sets how long the next round waits for its tree, unless that has arrived already."""
    timeout, has_tree = assignment.attachment.timeout, assignment.candidate is not None
    assignment.verdict_s = now_s
    assignment.received_s = now_s if has_tree else None
    if has_tree:
        timeout.in_time()
    is_reading = assignment.num_requested <= 1 or not (
        assignment.num_received or assignment.attachment.policy.is_always_on
    )
    is_late = is_reading or assignment.attachment.warm_up.is_on(now_s)
    assignment.is_excused = not has_tree and is_late
    if assignment.is_excused or assignment.requested.is_paused:
        assignment.deadline_s = now_s
    else:
        assignment.deadline_s = timeout.deadline_s(now_s, assignment.worthwhile_wait_s)
