"""A draft comes and goes; sequences find another or go on alone."""

from __future__ import annotations

from shared.tokens import EMPTY_TREE
from tests.helpers.one_draft import make_attachment, make_candidate, offer, with_one_draft


def test_attached_draft_is_handed_running_sequences_with_all_tokens() -> None:
    attachments, attachment, sequence = with_one_draft()
    [(_, message)] = attachments.drafts.take_messages()
    assert message.opened[0].token_ids == (1, 2)
    assert message.opened[0].sampling.seed == 3
    assert attachment.sequence_ids == {sequence.sequence_id}


def test_candidate_of_a_draft_that_left_is_dropped() -> None:
    attachments, _, sequence = with_one_draft()
    attachments.detach("a", 0.0)
    offer(attachments, [make_candidate(sequence)], 0.0)
    assert attachments.assignments.tree(sequence) == EMPTY_TREE
    assert attachments.readiness.is_ready(sequence, 0.0)


def test_sequences_of_a_lost_draft_move_to_another() -> None:
    attachments, _, sequence = with_one_draft()
    other = make_attachment("b")
    attachments.attach(other, [], 0.0)
    attachments.detach("a", 0.0)
    assert other.sequence_ids == {sequence.sequence_id}
