"""The attached drafts, their assignments and their candidates. No torch.

A draft is an accelerator: its messages may be late, stale, duplicated or lost, and the target steps
all the same.
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
from services.target.sequence import Sequence
from services.target.step_report import OutcomeTally, SpeculationCounts
from shared.candidate_columns import CandidateColumns, Run
from shared.generation import DraftAnswer
from shared.tokens import TreeRequest, TreeShape

GATHERING_RESPONSES = 1.5
"""Longest time that a tree is held back for others, in response times of a draft."""


class Readiness:
    """Decides which sequences step now and which wait for trees. Owned by the engine thread.

    A sequence steps when its tree has arrived, or when the wait for it has timed out. Trees that
    have arrived may be held back for a moment, so that one step verifies them with the next ones.
    """

    def __init__(self, drafts: DraftRegistry, assignments: Assignments) -> None:
        self._drafts = drafts
        self._assignments = assignments
        self._hold_until_s = -math.inf

    def begin_turn(self, running: SequenceOf[Sequence], now_s: float) -> None:
        """Begins a turn of the loop: updates the tree requests and moves sequences between drafts.

        Args:
            running: sequences that may be assigned to drafts.
        """
        if self._drafts.live:
            self.update_policies(running, now_s)
            self._assignments.leave_silent_drafts(now_s)
            self._assignments.reassign(running, now_s)
            places = [self._assignments.get(sequence.sequence_id) for sequence in running]
            waiting = [place for place in places if place is not None and place.candidate is None]
            self._assignments.move_one(waiting, now_s)

    def update_policies(self, running: SequenceOf[Sequence], now_s: float) -> None:
        """Decides which trees drafts are asked for. A round on the device may be in flight."""
        drafted = [sequence for sequence in running if not sequence.request.speculation_disabled]
        num_decoding = sum(sequence.num_uncomputed == 1 for sequence in drafted)
        for policy in self._drafts.policies:
            policy.turn(num_decoding, now_s, len(drafted) - num_decoding)

    def disregard(self) -> None:
        """Excludes the current step from the measurements, because it captures graphs."""
        for policy in self._drafts.policies:
            policy.disregard()

    def hold_trees(self, sequences: Iterable[Sequence], now_s: float) -> bool:
        """Holds back the trees that have arrived if more than half of the sequences still wait for
        theirs, and returns whether it did.

        Half of the sequences are verified while the drafts work for the other half; smaller rounds
        would read the weights more often. Sequences without a draft never wait.
        """
        self._hold_until_s = -math.inf
        waiting, num_sequences = list[Assignment](), 0
        for sequence in sequences:
            assignment = self._assignments.get(sequence.sequence_id)
            if assignment is None:
                return False
            num_sequences += 1
            if assignment.candidate is None and now_s < assignment.deadline_s:
                waiting.append(assignment)
        if 2 * len(waiting) <= num_sequences:
            return False
        for assignment in waiting:
            if assignment.verdict_s is not None:  # else nothing tells when its tree arrives
                usual_s = assignment.attachment.timeout.response_s or 0.0
                expected_s = assignment.verdict_s + GATHERING_RESPONSES * usual_s
                self._hold_until_s = max(self._hold_until_s, expected_s)
        return now_s < self._hold_until_s

    def is_ready(self, sequence: Sequence, now_s: float) -> bool:
        """Whether a sequence can step: its tree has arrived and is not held back, or the sequence
        does not wait for one."""
        return now_s >= self.deadline_s(sequence)

    def deadline_s(self, sequence: Sequence) -> float:
        """Time until which the sequence waits; minus infinity if it has no draft or holds a tree
        that is not held back."""
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            return -math.inf
        return assignment.deadline_s if assignment.candidate is None else self._hold_until_s

    def begin_rounds(self, sequences: Iterable[Sequence]) -> None:
        """Marks sequences whose round a step computes from now on. Their trees are fixed: until
        the verdict, only candidates for the next round are accepted."""
        for sequence in sequences:
            assignment = self._assignments.get(sequence.sequence_id)
            if assignment is not None:
                assignment.is_stepping = True


def _take(
    assignment: Assignment, columns: CandidateColumns, run: Run, place: int, now_s: float
) -> None:
    """Takes an unconditional candidate."""
    is_current = assignment.fences(run)
    assignment.num_received += 1
    # A first tree waits for the prompt as well, so that its time says nothing of a response.
    response_s = None if assignment.num_received == 1 else assignment.response_s(now_s)
    if not is_current or assignment.is_stepping:
        assignment.attachment.counters.num_stale_candidates += 1
        assignment.stale_in_round = True
        # A step that began with a tree needs no other: this one came twice.
        if is_current and assignment.candidate is None:
            # The step began without this tree, but the tree came before the step's end. Such a
            # draft is worth waiting for, and the subtree below the round's tokens can be used.
            assignment.late_candidate = columns.candidate(place)
            assignment.attachment.timeout.responded(response_s)
        return
    assignment.receive(columns.candidate(place), now_s)
    assignment.attachment.timeout.responded(response_s)


class Attachments:
    """The drafts of one engine and their sequences. Owned by the engine thread.

    Args: see `DraftRegistry`.

    Attributes:
        drafts: the attached drafts.
        assignments: the draft and the tree of each sequence.
        readiness: decides which sequences step now.
        verdicts: sends drafts the committed tokens.
    """

    def __init__(self, config: AdaptiveConfig | None = None, *, always_up_to: int = ALWAYS) -> None:
        self.drafts = DraftRegistry(config, always_up_to=always_up_to)
        self.assignments = Assignments(self.drafts)
        self.readiness = Readiness(self.drafts, self.assignments)
        self.verdicts = Verdicts(self.drafts, self.assignments)

    @property
    def pays(self) -> bool | None:
        """Whether trees of any kind of draft are faster than plain steps; None while unknown."""
        policies = [policy for policy in self.drafts.policies if policy.pays is not None]
        return any(policy.pays for policy in policies) if policies else None

    def comparison(self) -> str:
        """Returns the figures behind `pays`."""
        policies = [policy for policy in self.drafts.policies if policy.pays is not None]
        return "; ".join(policy.comparison() for policy in policies)

    def offer(self, offer: Offer) -> None:
        """Takes the candidates that a draft pushed, and drops those for an outdated state.

        A candidate is fenced by (sequence, round, committed tokens) and by belonging to a live
        attachment; only one that matches is ever verified.
        """
        attachment = self.drafts.get(offer.attachment_id)
        if attachment is None:
            return
        attachment.report = offer.report
        attachment.policy.is_pinned = any(
            draft.report.pinned_shape is not None
            for draft in self.drafts.live
            if draft.policy is attachment.policy
        )
        attachment.warm_up.report(offer.arrived_s, is_warming=offer.report.is_warming)
        if attachment.warm_up.is_on(offer.arrived_s):
            # The draft says that its trees will be late.
            for own in self.assignments:
                if own.attachment is attachment and own.candidate is None:
                    own.stop_waiting(offer.arrived_s)
        if len(offer.candidates):
            attachment.timeout.candidates_arrived()
        for run in offer.candidates.runs():
            assignment = self.assignments.get(run.sequence_id)
            if assignment is None or assignment.attachment is not attachment:
                attachment.counters.num_stale_candidates += len(run.places)
            elif run.is_conditional:
                self._take_conditional(assignment, offer, run)
            else:
                for place in run.places:
                    _take(assignment, offer.candidates, run, place, offer.arrived_s)

    def _take_conditional(self, assignment: Assignment, offer: Offer, run: Run) -> None:
        """Keeps candidates for possible verdicts of the current round. Of candidates for the
        previous round, takes the one that names its verdict, and drops the others."""
        attachment, columns = assignment.attachment, offer.candidates
        if assignment.fences(run):
            assignment.push(columns, run.places)
            return
        place = None
        if assignment.candidate is None:
            place = assignment.match_last_verdict(columns, run)
        attachment.counters.num_stale_candidates += len(run.places) - (place is not None)
        if place is not None:
            assignment.receive(columns.candidate(place), offer.arrived_s)
            attachment.timeout.responded(assignment.response_s(offer.arrived_s))
            for tally in (attachment.outcomes, self.verdicts.outcomes):
                tally.num_late_hits += 1

    def attach(self, attachment: Attachment, sequences: Iterable[Sequence], now_s: float) -> None:
        """Adds a draft, and assigns to drafts the running sequences that have none."""
        self.drafts.add(attachment)
        for sequence in sequences:
            self.assignments.assign(sequence, now_s)

    def detach(self, attachment_id: str, now_s: float) -> Attachment | None:
        """Removes a draft. Its sequences move to other drafts with room, or go on without one."""
        attachment = self.drafts.remove(attachment_id)
        if attachment is not None:
            self.assignments.hand_over(attachment, now_s)
        return attachment

    def statuses(self) -> tuple[AttachmentStatus, ...]:
        """Returns the drafts, oldest first, with their tree requests."""
        return tuple(map(self._status, self.drafts.live))

    def _status(self, attachment: Attachment) -> AttachmentStatus:
        own = filter(lambda assignment: assignment.attachment is attachment, self.assignments)
        requests = [assignment.requested for assignment in own]
        counts = [count for request in requests if (count := request.num_outcomes) is not None]
        return AttachmentStatus(
            attachment,
            _requested_shape(attachment, requests),
            sum(request.is_paused for request in requests),
            tuple(attachment.policy.level_rates()),
            num_outcomes=max(counts, default=None),
        )


def _requested_shape(attachment: Attachment, requests: SequenceOf[TreeRequest]) -> TreeShape | None:
    """Returns the shape requested for most sequences of a draft, or the one that would be requested
    for a first sequence; None while no tree is wanted."""
    pinned = attachment.report.pinned_shape
    if requests:
        base = pinned or attachment.base_shape
        shapes = Counter(request.shape or base for request in requests if not request.is_paused)
        return shapes.most_common(1)[0][0] if shapes else None
    return pinned or attachment.policy.choice


class Verdicts:
    """Sends verdicts to the drafts whose sequences have stepped. Owned by the engine thread.

    For each round, `answer` and `count_round` are called, then `decided` unless the sequence ended.

    Attributes:
        outcomes: verdicts for which drafts had prepared a tree, since the last `take_counts`.
        counts: paused rounds and trial rounds since then.
    """

    def __init__(self, drafts: DraftRegistry, assignments: Assignments) -> None:
        self._drafts = drafts
        self._assignments = assignments
        self.outcomes, self.counts = OutcomeTally(), SpeculationCounts()

    def take_counts(self) -> tuple[OutcomeTally, SpeculationCounts]:
        """Returns the counts since the last call."""
        taken = self.outcomes, self.counts
        self.outcomes, self.counts = OutcomeTally(), SpeculationCounts()
        return taken

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
        elif assignment.candidate is None and not (
            assignment.requested.is_paused or assignment.is_excused
        ):
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
            accepted_node_indices: indices into `Assignment.tree`.
            since_s: time of the verdict on the previous round; None for the first one.
        """
        round_s = None if since_s is None else now_s - since_s
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            self._observe_undrafted(sequence, len(committed_token_ids), round_s)
            return
        attachment, was_prepared = assignment.attachment, assignment.has_pushed
        accepted: tuple[int, ...] = ()
        if was_verified:
            accepted = tuple(assignment.drafted_nodes[node] for node in accepted_node_indices)
        num_accepted = len(accepted) if was_verified else None
        self._observe(assignment, len(committed_token_ids), num_accepted, round_s, now_s)
        verdict, foreseen = assignment.decide(
            committed_token_ids, accepted, was_verified=was_verified
        )
        attachment.outbox.verdicts.append(verdict)
        if was_verified:
            position = len(accepted_node_indices)
            for tally in (attachment.outcomes, self.outcomes):
                tally.count(position, foreseen, was_prepared=was_prepared)
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
        longest_s = math.inf
        if not assignment.has_fixed_depth:
            longest_s = assignment.attachment.policy.worthwhile_wait_s
        assignment.deadline_s = timeout.deadline_s(now_s, longest_s)
