"""The drafts that are attached now, what they were given and what they have pushed. No torch.

A draft is an accelerator: everything here may be late, stale, duplicated or gone, and the target
steps all the same. A candidate is fenced by (sequence, round, committed tokens) and by belonging
to a live attachment; only one that matches is ever verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.target.attachment import Attachment, DraftMessage, OpenedSequence
from services.target.feature_rows import FeatureRows
from services.target.sequence import Sequence
from shared.tokens import (
    EMPTY_TREE,
    Candidate,
    Condition,
    Outcome,
    TokenTree,
    Verdict,
)

MAX_CONDITIONAL_CANDIDATES = 64
"""Conditional candidates kept for one sequence and round; more are dropped."""


@dataclass(slots=True)
class _Assignment:
    """A sequence's place at a draft, and what the draft has pushed for it."""

    attachment: Attachment
    sequence: Sequence
    deadline_s: float
    asked_s: float | None = None
    candidate: Candidate | None = None
    conditional: dict[Condition, Candidate] = field(default_factory=dict)
    stale_in_round: bool = False
    num_heard: int = 0
    num_features_sent: int | None = None

    def fences(self, candidate: Candidate) -> bool:
        return candidate.round == self.sequence.round and candidate.committed_token_count == len(
            self.sequence.token_ids
        )


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
    """Registry of drafts and of the sequences assigned to them."""

    def __init__(self) -> None:
        self._attachments: dict[str, Attachment] = {}
        self._assignments: dict[int, _Assignment] = {}

    @property
    def live(self) -> tuple[Attachment, ...]:
        """Attachments, oldest first."""
        return tuple(self._attachments.values())

    def attach(self, attachment: Attachment, sequences: Iterable[Sequence], now_s: float) -> None:
        """Adds a draft and hands it the running sequences that have none."""
        self._attachments[attachment.identity.attachment_id] = attachment
        for sequence in sequences:
            self.assign(sequence, now_s)

    def detach(self, attachment_id: str, now_s: float) -> Attachment | None:
        """Removes a draft; its sequences move to others that have room, or go on alone."""
        attachment = self._attachments.pop(attachment_id, None)
        if attachment is None:
            return None
        for sequence_id in tuple(attachment.sequence_ids):
            sequence = self._assignments.pop(sequence_id).sequence
            self.assign(sequence, now_s)
        return attachment

    def assign(self, sequence: Sequence, now_s: float) -> None:
        """Hands a sequence to the draft with the fewest, if one has room and it wants one."""
        if sequence.request.speculation_disabled or sequence.sequence_id in self._assignments:
            return
        willing = [
            attachment
            for attachment in self._attachments.values()
            if attachment.has_room and sequence.sequence_id not in attachment.released
        ]
        if not willing:
            return
        attachment = min(willing, key=lambda each: len(each.sequence_ids))
        attachment.sequence_ids.add(sequence.sequence_id)
        attachment.outbox_opened.append(
            OpenedSequence(
                sequence.sequence_id,
                tuple(sequence.token_ids),
                sequence.num_prompt_tokens,
                sequence.sampling,
                sequence.round,
            )
        )
        # A first tree is never waited for: the draft may have a long prompt to read.
        self._assignments[sequence.sequence_id] = _Assignment(attachment, sequence, now_s)

    def close(self, sequence: Sequence) -> None:
        """Ends a sequence at its draft."""
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

    def offer(self, attachment_id: str, candidates: Iterable[Candidate], now_s: float) -> None:
        """Takes what a draft pushed; what does not match the current round is dropped."""
        attachment = self._attachments.get(attachment_id)
        if attachment is None:
            return
        for candidate in candidates:
            assignment = self._assignments.get(candidate.sequence_id)
            if assignment is None or assignment.attachment is not attachment:
                attachment.counters.num_stale_candidates += 1
            elif not assignment.fences(candidate):
                attachment.counters.num_stale_candidates += 1
                assignment.stale_in_round = True
            elif candidate.condition is None:
                assignment.candidate = candidate
                attachment.patience.heard(self._response_s(assignment, now_s))
            elif len(assignment.conditional) < MAX_CONDITIONAL_CANDIDATES:
                assignment.conditional[candidate.condition] = candidate

    def is_ready(self, sequence: Sequence, now_s: float) -> bool:
        """Whether a sequence can step: it has its candidate, or none is waited for any more."""
        assignment = self._assignments.get(sequence.sequence_id)
        return (
            assignment is None or assignment.candidate is not None or now_s >= assignment.deadline_s
        )

    def deadline_s(self, sequence: Sequence) -> float:
        """Until when the sequence waits for its candidate; long past when it waits for none."""
        assignment = self._assignments.get(sequence.sequence_id)
        return -math.inf if assignment is None else assignment.deadline_s

    def candidate_tree(self, sequence: Sequence) -> TokenTree:
        """The tree for the sequence's current round, perhaps empty."""
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None or assignment.candidate is None:
            return EMPTY_TREE
        return assignment.candidate.tree

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
        elif assignment.candidate is None and assignment.asked_s is not None:
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
        """
        assignment = self._assignments.get(sequence.sequence_id)
        if assignment is None:
            return
        attachment = assignment.attachment
        selected = self._select(assignment, accepted_node_indices, committed_token_ids[-1])
        attachment.outbox_verdicts.append(
            Verdict(
                sequence.sequence_id,
                sequence.round - 1,
                self._outcome(assignment, was_verified, selected),
                accepted_node_indices,
                committed_token_ids,
                len(sequence.token_ids),
            )
        )
        assignment.candidate = selected
        assignment.conditional.clear()
        assignment.stale_in_round = False
        assignment.asked_s = now_s
        assignment.deadline_s = attachment.patience.deadline_s(now_s)

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

    @staticmethod
    def _response_s(assignment: _Assignment, now_s: float) -> float | None:
        """Time since the verdict; None for a first tree, which waits for the prompt as well."""
        assignment.num_heard += 1
        if assignment.asked_s is None or assignment.num_heard == 1:
            return None
        return now_s - assignment.asked_s

    @staticmethod
    def _select(
        assignment: _Assignment, accepted_node_indices: tuple[int, ...], bonus_token_id: int
    ) -> Candidate | None:
        """The candidate that was pushed ahead for exactly this verdict."""
        node = accepted_node_indices[-1] if accepted_node_indices else None
        return assignment.conditional.get(Condition(node, bonus_token_id))

    @staticmethod
    def _outcome(
        assignment: _Assignment, was_verified: bool, selected: Candidate | None
    ) -> Outcome:
        if selected is not None and was_verified:
            return Outcome.VERIFIED_NEXT_READY
        if was_verified:
            return Outcome.VERIFIED
        return Outcome.STALE if assignment.stale_in_round else Outcome.MISSED
