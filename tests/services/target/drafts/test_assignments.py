"""Sequences are spread over the drafts that have room for them and want them."""

from __future__ import annotations

from services.target.drafts.attachments import Attachments
from tests.helpers.one_draft import make_attachment, make_sequence, with_one_draft


def test_sequences_spread_and_capacity_holds() -> None:
    attachments = Attachments()
    small, large = make_attachment("a", max_sequences=1), make_attachment("b")
    attachments.attach(small, [], 0.0)
    attachments.attach(large, [make_sequence(i) for i in range(5)], 0.0)
    assert len(small.sequence_ids) == 1
    assert len(large.sequence_ids) == 4


def test_released_sequence_is_not_handed_back_to_the_same_draft() -> None:
    attachments, attachment, sequence = with_one_draft()
    attachments.assignments.release("a", [sequence.sequence_id], 0.0)
    assert not attachment.sequence_ids
    attachments.assignments.assign(sequence, 0.0)
    assert not attachment.sequence_ids


def test_request_without_speculation_is_not_assigned() -> None:
    attachments, attachment = Attachments(), make_attachment()
    attachments.attach(attachment, [make_sequence(disabled=True)], 0.0)
    assert not attachment.sequence_ids


def test_a_draft_never_hears_of_what_was_closed_before_it_was_told() -> None:
    attachments, attachment, sequence = with_one_draft()
    attachments.assignments.close(sequence)
    assert not attachments.drafts.take_messages()
    assert not attachment.sequence_ids


def test_closed_sequence_is_told_once() -> None:
    attachments, attachment, sequence = with_one_draft()
    attachments.drafts.take_messages()
    attachments.assignments.close(sequence)
    attachments.assignments.close(sequence)
    [(_, message)] = attachments.drafts.take_messages()
    assert message.closed == [1]
    assert not attachment.sequence_ids
