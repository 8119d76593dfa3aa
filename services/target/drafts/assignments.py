"""Assigns sequences to drafts, moves them and takes them back. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from services.target.drafts.assignment import Assignment
from services.target.drafts.attachment import Attachment, OpenedSequence
from services.target.drafts.draft_registry import DraftRegistry
from services.target.sequence import Sequence
from shared.tokens import EMPTY_TREE, TokenTree

MIN_KINDS = 2
MIN_KIND_GAIN = 1.1
"""A kind of draft must be this much faster for a sequence to move there."""


class Assignments:
    """Sequences that have a draft, each at one. Owned by the engine thread."""

    def __init__(self, drafts: DraftRegistry) -> None:
        self._drafts = drafts
        self._by_sequence_id: dict[int, Assignment] = {}
        self._num_looked = 0

    def __len__(self) -> int:
        return len(self._by_sequence_id)

    def __iter__(self) -> Iterator[Assignment]:
        return iter(self._by_sequence_id.values())

    @property
    def num_paused(self) -> int:
        """Sequences that have a draft, but go without trees at the moment."""
        return sum(each.asked.is_paused for each in self)

    @property
    def num_drafted_for(self) -> int:
        """Sequences for which trees are wanted at the moment."""
        return len(self._by_sequence_id) - self.num_paused

    @property
    def are_trees_wanted(self) -> bool:
        """Whether a tree is wanted for the next round of any sequence."""
        return any(not each.tree_request.is_paused for each in self)

    @property
    def needs_every_step(self) -> bool:
        """Whether what a step commits decides what the next one computes: a tree is wanted for a
        sequence."""
        return any(each.needs_every_step for each in self)

    def get(self, sequence_id: int) -> Assignment | None:
        """Returns the place of a sequence; None when it has no draft."""
        return self._by_sequence_id.get(sequence_id)

    def candidate_tree(self, sequence: Sequence) -> TokenTree:
        """The tree for the sequence's current round, perhaps empty."""
        assignment = self.get(sequence.sequence_id)
        return EMPTY_TREE if assignment is None else assignment.tree

    def tree(self, sequence: Sequence) -> TokenTree:
        """Returns what can be verified of drafts in the sequence's current round: the tree for it,
        or what is left of the one that came too late for the round before; perhaps empty."""
        assignment = self.get(sequence.sequence_id)
        if assignment is None:
            return EMPTY_TREE
        return assignment.tree if assignment.candidate is not None else assignment.rest

    def has_tree(self, sequence: Sequence) -> bool:
        """Whether the sequence's draft has a tree for the current round."""
        return bool(self.candidate_tree(sequence).token_ids)

    def assign(self, sequence: Sequence, now_s: float) -> None:
        """Hands a sequence to a draft with room, if it wants one and trees are wanted: of the kind
        that is fastest, and there to the one that answers soonest."""
        willing = self._willing(sequence)
        heard = [each for each in willing if not each.is_avoided(now_s)]
        if willing:
            self._place(sequence, _best(heard or willing), now_s)

    def any_moves(self, running: SequenceOf[Sequence], now_s: float) -> bool:
        """Whether `follow` would hand out or take back any of these, or `leave_silent` move one."""
        if any(_was_left(each) for each in self):
            return True
        if len(self) < len(running) and any(map(self._willing, running)):
            return True
        return any(self._refuges(each) for each in self._left_alone(now_s))

    def leave_silent(self, now_s: float) -> None:
        """Takes sequences from drafts that do not answer to others that do and have room."""
        for assignment in self._left_alone(now_s):
            sequence, others = assignment.sequence, self._refuges(assignment)
            if others:
                self._close(assignment)
                self._place(sequence, _best(others), now_s)

    def _left_alone(self, now_s: float) -> list[Assignment]:
        if not self._drafts.are_some_silent:
            return []
        return [each for each in self if each.is_left_alone(now_s)]

    def _refuges(self, assignment: Assignment) -> list[Attachment]:
        takers = self._takers(assignment.sequence)
        return [each for each in takers if not each.timeout.is_cold]

    def _willing(self, sequence: Sequence) -> list[Attachment]:
        """Returns the drafts that a sequence without one may go to."""
        if sequence.request.speculation_disabled or sequence.prediction is not None:
            return []
        if sequence.sequence_id in self._by_sequence_id:
            return []
        return self._takers(sequence)

    def _takers(self, sequence: Sequence) -> list[Attachment]:
        return [each for each in self._drafts.live if _is_wanted(each, sequence)]

    def follow(self, running: SequenceOf[Sequence], now_s: float) -> None:
        """Takes sequences back from drafts of which no trees are wanted any more, and hands out
        those that have no draft where trees are wanted."""
        for assignment in list(filter(_was_left, self)):
            self._close(assignment)
        if len(self) < len(running):
            for sequence in running:
                self.assign(sequence, now_s)

    def hand_over(self, attachment: Attachment, now_s: float) -> None:
        """A draft has left: others with room take its sequences."""
        for sequence_id in tuple(attachment.sequence_ids):
            sequence = self._by_sequence_id.pop(sequence_id).sequence
            self.assign(sequence, now_s)

    def release(self, attachment_id: str, sequence_ids: Iterable[int], now_s: float) -> None:
        """A draft hands sequences back; others with room take them."""
        attachment = self._drafts.get(attachment_id)
        for sequence_id in sequence_ids:
            assignment = self.get(sequence_id)
            if attachment is None or assignment is None or assignment.attachment is not attachment:
                continue
            self._take_out(assignment)
            attachment.released.add(sequence_id)
            self.assign(assignment.sequence, now_s)

    def close(self, sequence: Sequence) -> None:
        """Ends a sequence at its draft."""
        for attachment in self._drafts.live:
            attachment.released.discard(sequence.sequence_id)
        assignment = self.get(sequence.sequence_id)
        if assignment is not None:
            self._close(assignment)

    def move_one(self, held: SequenceOf[Assignment], now_s: float) -> None:
        """Takes a sequence to a draft of another kind that is faster, or not known yet. One is
        looked at a step, in turn."""
        if not held or len(self._drafts.policies) < MIN_KINDS:
            return
        self._num_looked += 1
        assignment = held[self._num_looked % len(held)]
        sequence, own = assignment.sequence, assignment.attachment
        if assignment.candidate is not None:
            return
        others = [
            each
            for each in self._drafts.live
            if each.kind != own.kind
            and _is_wanted(each, sequence)
            and _speed(each) > MIN_KIND_GAIN * _speed(own)
        ]
        is_known = own.policy.speed is not None
        if others and is_known and not assignment.is_bound:
            self._close(assignment)
            self._place(sequence, _best(others), now_s)

    def _place(self, sequence: Sequence, attachment: Attachment, now_s: float) -> None:
        """Opens a sequence at a draft."""
        # A first tree is never waited for: the draft may have a long prompt to read.
        assignment = Assignment(attachment, sequence, now_s)
        assignment.asked = assignment.tree_request
        self._by_sequence_id[sequence.sequence_id] = assignment
        attachment.sequence_ids.add(sequence.sequence_id)
        attachment.outbox_opened.append(
            OpenedSequence(
                sequence.sequence_id,
                tuple(sequence.token_ids),
                sequence.num_prompt_tokens,
                sequence.sampling,
                sequence.round,
                assignment.asked,
                request_id=sequence.request.request_id,
                traceparent=sequence.request.traceparent,
                cache_salt=sequence.request.cache_salt,
            )
        )

    def _close(self, assignment: Assignment) -> None:
        """Takes a sequence from its draft, and says so there."""
        self._take_out(assignment)
        assignment.attachment.close(assignment.sequence.sequence_id)

    def _take_out(self, assignment: Assignment) -> None:
        sequence_id = assignment.sequence.sequence_id
        del self._by_sequence_id[sequence_id]
        assignment.attachment.sequence_ids.remove(sequence_id)


def _is_wanted(attachment: Attachment, sequence: Sequence) -> bool:
    """Whether a draft may have a sequence, and trees of it are wanted."""
    if not attachment.takes(sequence):
        return False
    return sequence.request.num_draft_steps is not None or attachment.policy.is_on


def _was_left(assignment: Assignment) -> bool:
    """Whether no trees are wanted of the draft any more."""
    return not (assignment.is_bound or assignment.attachment.policy.is_on)


def _speed(attachment: Attachment) -> float:
    """Returns the tokens a second of a sequence. Of an unknown kind one sequence finds that out."""
    speed = attachment.policy.speed
    if speed is None:
        return 0.0 if attachment.sequence_ids else math.inf
    return speed


def _best(drafts: Iterable[Attachment]) -> Attachment:
    """Returns the draft of the fastest kind that would keep a sequence waiting least."""
    return min(drafts, key=lambda each: (-_speed(each), each.load))
