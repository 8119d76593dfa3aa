"""The drafts that are attached now, what they were given and what they have pushed. No torch.

A draft is an accelerator: everything here may be late, stale, duplicated or gone, and the target
steps all the same. A candidate is fenced by (sequence, round, committed tokens) and by belonging
to a live attachment; only one that matches is ever verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from services.target.assignment import Assignment
from services.target.attachment import Attachment, AttachmentStatus, DraftMessage, OpenedSequence
from services.target.feature_rows import FeatureRows
from services.target.miss_ladder import MissLadder
from services.target.outcome_tally import OutcomeTally
from services.target.round_trace import DraftAnswer
from services.target.sequence import Sequence
from services.target.speculation_controller import Ready, SpeculationController
from services.target.step_report import StepReport
from shared.errors import InvalidArgument
from shared.tokens import EMPTY_TREE, NO_REPORT, Candidate, DraftReport, TokenTree, TreeWish


@dataclass(frozen=True, slots=True)
class FeatureNeed:
    """A sequence whose draft lacks rows that are computed.

    Attributes:
        start: first position to send; None when nothing was sent yet.
    """

    attachment: Attachment
    sequence: Sequence
    start: int | None


class Attachments:
    """Registry of drafts and of the sequences assigned to them.

    Attributes:
        controller: decides what is wanted of drafts and what is verified of it.
        algorithms: of the live drafts, sorted, each once. Replaced, never changed, so that other
            threads may read it.
        known_algorithms: of every draft that ever attached.
    """

    def __init__(
        self,
        ladder: MissLadder | None = None,
        controller: SpeculationController | None = None,
    ) -> None:
        """`ladder` says what to do in a round without a candidate; by default it waits."""
        self._ladder = ladder or MissLadder()
        self.controller = controller or SpeculationController(None)
        self.algorithms: tuple[str, ...] = ()
        self.known_algorithms: set[str] = set()
        self._attachments: dict[str, Attachment] = {}
        self._assignments: dict[int, Assignment] = {}
        self._new_outcomes = OutcomeTally()
        self._hold_until_s = -math.inf
        self._num_looked = 0

    @property
    def num_paused(self) -> int:
        """Sequences that have a draft, but go without trees at the moment."""
        return sum(each.course.asked.is_paused for each in self._assignments.values())

    @property
    def num_drafted_for(self) -> int:
        """Sequences for which trees are wanted at the moment."""
        return len(self._assignments) - self.num_paused

    @property
    def needs_every_step(self) -> bool:
        """Whether what a step commits decides what the next one computes, or has to go out at
        once: a tree is wanted for a sequence, or a draft reads features."""
        return any(each.needs_every_step for each in self._assignments.values())

    @property
    def live(self) -> tuple[Attachment, ...]:
        """Attachments, oldest first."""
        return tuple(self._attachments.values())

    def statuses(self) -> tuple[AttachmentStatus, ...]:
        """Returns the drafts, oldest first, with what is wanted of them."""
        return tuple(map(self._status, self._attachments.values()))

    def check_algorithm(self, algorithm: str | None) -> None:
        """A draft that left may come back, so its algorithm stays good.

        Raises:
            InvalidArgument: no draft of the algorithm ever attached.
        """
        if algorithm is None or algorithm in self.known_algorithms:
            return
        known = ", ".join(sorted(self.known_algorithms)) or "no draft at all"
        message = f"no draft of algorithm {algorithm!r} ever attached; there was {known}"
        raise InvalidArgument.of("ALGORITHM_UNKNOWN", "speculation.algorithm", message)

    def attach(self, attachment: Attachment, sequences: Iterable[Sequence], now_s: float) -> None:
        """Adds a draft and hands it the running sequences that have none."""
        self._attachments[attachment.identity.attachment_id] = attachment
        self.known_algorithms.add(attachment.identity.algorithm)
        self._publish_algorithms()
        for sequence in sequences:
            self.assign(sequence, now_s)

    def detach(self, attachment_id: str, now_s: float) -> Attachment | None:
        """Removes a draft; its sequences move to others that have room, or go on alone."""
        attachment = self._attachments.pop(attachment_id, None)
        if attachment is None:
            return None
        self._publish_algorithms()
        for sequence_id in tuple(attachment.sequence_ids):
            sequence = self._assignments.pop(sequence_id).sequence
            self.assign(sequence, now_s)
        return attachment

    def assign(self, sequence: Sequence, now_s: float) -> None:
        """Hands a sequence to a draft with room, if it wants one: of the kind that promises most
        for it, and there more to faster ones."""
        if sequence.request.speculation_disabled or sequence.sequence_id in self._assignments:
            return
        willing = [each for each in self._attachments.values() if each.takes(sequence)]
        if not willing:
            return
        attachment = self.controller.best_draft(sequence, willing)
        self._place(sequence, attachment, now_s)

    def _place(self, sequence: Sequence, attachment: Attachment, now_s: float) -> None:
        attachment.sequence_ids.add(sequence.sequence_id)
        course = self.controller.course(attachment, sequence)
        attachment.outbox_opened.append(
            OpenedSequence(
                sequence.sequence_id,
                tuple(sequence.token_ids),
                sequence.num_prompt_tokens,
                sequence.sampling,
                sequence.round,
                course.wish,
                request_id=sequence.request.request_id,
                traceparent=sequence.request.traceparent,
            )
        )
        # A first tree is never waited for: the draft may have a long prompt to read.
        self._assignments[sequence.sequence_id] = Assignment(attachment, sequence, course, now_s)

    def close(self, sequence: Sequence) -> None:
        """Ends a sequence at its draft."""
        self.controller.forget(sequence)
        assignment = self._assignments.pop(sequence.sequence_id, None)
        for attachment in self._attachments.values():
            attachment.released.discard(sequence.sequence_id)
        if assignment is not None:
            assignment.attachment.sequence_ids.remove(sequence.sequence_id)
            assignment.attachment.outbox_closed.append(sequence.sequence_id)

    def release(self, attachment_id: str, sequence_ids: Iterable[int], now_s: float) -> None:
        """A draft hands sequences back; others with room take them."""
        attachment = self._attachments.get(attachment_id)
        for sequence_id in sequence_ids:
            assignment = self._assignments.get(sequence_id)
            if attachment is None or assignment is None or assignment.attachment is not attachment:
                continue
            del self._assignments[sequence_id]
            attachment.sequence_ids.remove(sequence_id)
            attachment.released.add(sequence_id)
            self.assign(assignment.sequence, now_s)

    def offer(
        self,
        attachment_id: str,
        candidates: Iterable[Candidate],
        now_s: float,
        report: DraftReport = NO_REPORT,
    ) -> None:
        """Takes what a draft pushed; what is for another state than the current is dropped."""
        attachment = self._attachments.get(attachment_id)
        if attachment is None:
            return
        attachment.report = report
        for candidate in candidates:
            assignment = self._assignments.get(candidate.sequence_id)
            if assignment is None or assignment.attachment is not attachment:
                attachment.counters.num_stale_candidates += 1
            elif candidate.condition is not None:
                self._offer_conditional(assignment, candidate, now_s)
            elif not assignment.awaits(candidate):
                attachment.counters.num_stale_candidates += 1
                assignment.stale_in_round = True
            else:
                assignment.receive(candidate, now_s)
                attachment.patience.heard(self._response_s(assignment, now_s))

    def prepare(self, running: Iterable[Sequence], now_s: float) -> None:
        """A step is about to be planned: revises what is wanted, and cuts the trees that came."""
        self.controller.wake(now_s)
        decoding = [sequence for sequence in running if sequence.num_uncomputed == 1]
        found = [self._assignments.get(sequence.sequence_id) for sequence in decoding]
        held = [assignment for assignment in found if assignment is not None]
        self._hold_until_s = self._gathering_until_s(decoding, held, now_s)
        if now_s < self._hold_until_s:
            return
        ready = [
            (assignment, Ready(assignment.course, assignment.candidate.tree, assignment.heard_s))
            for assignment in held
            if assignment.candidate is not None and assignment.heard_s is not None
        ]
        cuts = self.controller.begin_step(
            [assignment.course for assignment in held],
            [each for _, each in ready],
            now_s,
            num_plain=len(decoding) - len(held),
            num_late=sum(each.is_late for each in held),
            num_stepping=sum(self.is_ready(sequence, now_s) for sequence in decoding),
        )
        for (assignment, _), kept in zip(ready, cuts, strict=True):
            assignment.kept = kept
        if len({attachment.kind for attachment in self._attachments.values()}) > 1:
            self._move_one(held, now_s)

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

    def candidate_tree(self, sequence: Sequence) -> TokenTree:
        """The tree for the sequence's current round, perhaps empty."""
        assignment = self._assignments.get(sequence.sequence_id)
        return EMPTY_TREE if assignment is None else assignment.tree

    def has_tree(self, sequence: Sequence) -> bool:
        """Whether the sequence's draft has a tree for the current round."""
        return bool(self.candidate_tree(sequence).token_ids)

    def begin_rounds(self, sequences: Iterable[Sequence]) -> None:
        """A step begins that draws tokens of these sequences; their trees are chosen. Until
        `decided`, only what is pushed ahead is taken for them."""
        for sequence in sequences:
            assignment = self._assignments.get(sequence.sequence_id)
            if assignment is not None:
                assignment.is_stepping = True

    def answer(self, sequence: Sequence) -> DraftAnswer | None:
        """Who answered for the sequence's current round, and how fast; before `decided`."""
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
        """Counts a round of a sequence, its last one included, before `decided` or `close`."""
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            return
        counters = assignment.attachment.counters
        if was_verified:
            counters.num_verified_rounds += 1
            counters.num_accepted += num_accepted
        elif assignment.is_missed:
            counters.num_missed_rounds += 1
            assignment.attachment.patience.missed(now_s)
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
            accepted_node_indices: into `candidate_tree`.
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
            for tally in (attachment.outcomes, self._new_outcomes):
                tally.count(position, foreseen, was_prepared=was_prepared)
        assignment.asked_s = now_s
        assignment.heard_s = None if assignment.candidate is None else now_s
        assignment.prefers_local = assignment.candidate is None and not self._ladder.waits(
            sequence, attachment.patience.response_s
        )
        goes_on = assignment.prefers_local or wish.is_paused
        assignment.deadline_s = now_s if goes_on else attachment.patience.deadline_s(now_s)

    @property
    def is_prepared(self) -> bool:
        """Whether drafts have prepared for every verdict that a step under way is to bring."""
        stepping = [each for each in self._assignments.values() if each.is_stepping]
        return all(each.has_pushed for each in stepping if each.tree.token_ids)

    def end_step(
        self,
        reports: SequenceOf[StepReport],
        start_s: float,
        now_s: float,
        *,
        is_timed: bool = True,
    ) -> None:
        """Everyone has been told what was committed since `start_s`.

        Args:
            reports: of the steps that were; none where the loop only waits or fills.
            is_timed: whether the time since `start_s` is that of the step.
        """
        for report in reports:
            # Of two steps in one go it is unknown which took how long.
            is_decode = is_timed and report.num_prompt_rows == 0 and len(reports) == 1
            duration_s = (now_s - start_s) / len(reports)
            self.controller.end_step(report.num_rows, duration_s, is_decode=is_decode)
        self.controller.rest(now_s)

    def take_outcomes(self) -> OutcomeTally:
        """Returns how verdicts were foreseen since the last call."""
        outcomes, self._new_outcomes = self._new_outcomes, OutcomeTally()
        return outcomes

    def feature_needs(self) -> list[FeatureNeed]:
        """Returns the sequences with computed positions that their draft has no features of."""
        return [
            FeatureNeed(each.attachment, each.sequence, each.num_features_sent)
            for each in self._assignments.values()
            if each.attachment.feature_spec is not None
            and each.sequence.num_computed > (each.num_features_sent or 0)
        ]

    def send_features(self, need: FeatureNeed, rows: FeatureRows) -> None:
        """Puts rows into the draft's next message."""
        self._assignments[need.sequence.sequence_id].num_features_sent = rows.end
        if len(rows.rows):
            need.attachment.outbox_features.append(rows)

    def take_messages(self) -> list[tuple[Attachment, DraftMessage]]:
        """Empties every outbox: one message a draft."""
        messages: list[tuple[Attachment, DraftMessage]] = []
        for attachment in self._attachments.values():
            message = attachment.take_message()
            if message is not None:
                messages.append((attachment, message))
        return messages

    def _move_one(self, held: SequenceOf[Assignment], now_s: float) -> None:
        """Takes a sequence to a draft of another kind, if that promises it more. One is looked at
        a step, in turn."""
        if not held:
            return
        self._num_looked += 1
        assignment = held[self._num_looked % len(held)]
        sequence, own = assignment.sequence, assignment.attachment
        if assignment.candidate is not None:
            return
        others = [
            each
            for each in self._attachments.values()
            if each.kind != own.kind
            and each.takes(sequence)
            and self.controller.is_better(each, assignment.course)
        ]
        if others:
            self._leave(assignment)
            self._place(sequence, self.controller.best_draft(sequence, others), now_s)

    def _leave(self, assignment: Assignment) -> None:
        """Closes a sequence at its draft."""
        sequence_id = assignment.sequence.sequence_id
        del self._assignments[sequence_id]
        assignment.attachment.sequence_ids.remove(sequence_id)
        assignment.attachment.outbox_closed.append(sequence_id)

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
        return self.controller.gathering_until_s(ready, [each.course for each in late], now_s)

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
            self.controller.observe_round(
                assignment.course,
                tree,
                range(len(tree)) if kept is None else kept.nodes,
                accepted,
                max_levels=assignment.sequence.num_remaining + num_committed - 1,
            )
        return self.controller.end_round(assignment.course, num_committed - 1)

    def _status(self, attachment: Attachment) -> AttachmentStatus:
        wishes = [
            each.course.asked
            for each in self._assignments.values()
            if each.attachment is attachment
        ]
        return AttachmentStatus(
            attachment,
            self.controller.wanted_shape(attachment),
            sum(wish.is_paused for wish in wishes),
            tuple(self.controller.level_rates(attachment)),
        )

    def _publish_algorithms(self) -> None:
        self.algorithms = tuple(
            sorted({each.identity.algorithm for each in self._attachments.values()})
        )

    def _offer_conditional(
        self, assignment: Assignment, candidate: Candidate, now_s: float
    ) -> None:
        attachment = assignment.attachment
        if assignment.fences(candidate):
            assignment.push(candidate)
        elif assignment.candidate is None and assignment.is_awaited(candidate):
            assignment.receive(candidate, now_s)
            attachment.patience.heard(None)
            for tally in (attachment.outcomes, self._new_outcomes):
                tally.count_late_hit()
        else:
            attachment.counters.num_stale_candidates += 1

    @staticmethod
    def _response_s(assignment: Assignment, now_s: float) -> float | None:
        """Time since the verdict; None for a first tree, which waits for the prompt as well."""
        assignment.num_heard += 1
        if assignment.asked_s is None or assignment.num_heard == 1:
            return None
        return now_s - assignment.asked_s
