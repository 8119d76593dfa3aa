"""A sequence steps when its tree is here, or when it has been waited for long enough."""

from __future__ import annotations

from shared.tokens import EMPTY_TREE
from tests.helpers.one_draft import commit, make_candidate, offer, with_one_draft


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
    assert attachments.assignments.candidate_tree(sequence) == EMPTY_TREE
