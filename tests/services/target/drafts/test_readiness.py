"""A sequence steps when its tree is here, or when it has been waited for long enough."""

from __future__ import annotations

from services.target.drafts.attachments import GATHERING_RESPONSES, Attachments
from shared.tokens import EMPTY_TREE
from tests.helpers.one_draft import (
    commit,
    make_attachment,
    make_candidate,
    make_sequence,
    offer,
    with_one_draft,
)


def test_sequence_waits_for_its_candidate_until_the_deadline() -> None:
    attachments, _, sequence = with_one_draft(wait_s=1.0)
    assert attachments.readiness.is_ready(sequence, 0.0), "the first tree is never waited for"
    commit(attachments, sequence, (4,), now_s=10.0)
    assert not attachments.readiness.is_ready(sequence, 10.5)
    assert attachments.readiness.is_ready(sequence, 11.0)
    offer(attachments, [make_candidate(sequence)], 10.6)
    assert attachments.readiness.is_ready(sequence, 10.6)


def test_empty_tree_ends_the_wait() -> None:
    attachments, _, sequence = with_one_draft()
    commit(attachments, sequence, (4,))
    offer(attachments, [make_candidate(sequence, EMPTY_TREE)], 0.1)
    assert attachments.readiness.is_ready(sequence, 0.1)
    assert attachments.assignments.tree(sequence) == EMPTY_TREE


def test_trees_wait_for_those_that_most_lanes_wait_for() -> None:
    attachments, attachment = Attachments(), make_attachment(wait_s=1.0)
    lanes = [make_sequence(number) for number in range(1, 5)]
    attachments.attach(attachment, lanes, 0.0)
    for sequence in lanes:
        commit(attachments, sequence, (4,), now_s=10.0)
    attachment.timeout.responded(0.1)
    readiness = attachments.readiness
    offer(attachments, [make_candidate(lanes[0])], 10.05)
    assert readiness.hold_trees(lanes, 10.05)
    assert not readiness.is_ready(lanes[0], 10.05)
    assert not readiness.hold_trees(lanes, 10.0 + GATHERING_RESPONSES * 0.1), "they are late"
    assert readiness.hold_trees(lanes, 10.06)
    offer(attachments, [make_candidate(lanes[1])], 10.07)
    assert not readiness.hold_trees(lanes, 10.07), "half of them are here"
    assert readiness.is_ready(lanes[0], 10.07)
    assert not readiness.is_ready(lanes[2], 10.07)


def test_lane_without_a_draft_waits_for_nobody() -> None:
    attachments, _, sequence = with_one_draft(wait_s=1.0)
    commit(attachments, sequence, (4,), now_s=10.0)
    other = make_sequence(7, disabled=True)
    assert not attachments.readiness.hold_trees([sequence, other], 10.0)
