"""Whatever a draft pushes, only a tree for exactly the current state is ever verified."""

from __future__ import annotations

import pytest

from services.target.drafts.attachment import MISSES_UNTIL_COLD
from shared.tokens import EMPTY_TREE, Candidate, Condition, TokenTree
from tests.helpers.one_draft import (
    TREE,
    commit,
    make_candidate,
    make_sequence,
    offer,
    pushed_ahead,
    with_one_draft,
)


def test_matching_candidate_is_offered_for_the_round() -> None:
    attachments, _, sequence = with_one_draft()
    offer(attachments, [make_candidate(sequence)], 0.0)
    assert attachments.assignments.tree(sequence) == TREE


def test_stale_round_is_not_verified() -> None:
    attachments, attachment, sequence = with_one_draft()
    commit(attachments, sequence, (4,))
    offer(attachments, [make_candidate(sequence, round=0)], 0.0)
    assert attachments.assignments.tree(sequence) == EMPTY_TREE
    assert attachment.counters.num_stale_candidates == 1


def test_wrong_committed_count_is_not_verified() -> None:
    attachments, _, sequence = with_one_draft()
    offer(attachments, [make_candidate(sequence, committed_token_count=1)], 0.0)
    assert attachments.assignments.tree(sequence) == EMPTY_TREE


def test_duplicate_candidate_is_verified_once() -> None:
    attachments, _, sequence = with_one_draft()
    candidate = make_candidate(sequence)
    offer(attachments, [candidate, candidate], 0.0)
    commit(attachments, sequence, (5,), was_verified=True)
    offer(attachments, [candidate], 0.0)
    assert attachments.assignments.tree(sequence) == EMPTY_TREE


def test_unknown_sequence_is_dropped() -> None:
    attachments, attachment, _ = with_one_draft()
    offer(attachments, [make_candidate(make_sequence(77))], 0.0)
    assert attachment.counters.num_stale_candidates == 1


def test_answer_that_comes_before_the_end_of_its_round_says_how_fast_the_draft_is() -> None:
    attachments, attachment, sequence = with_one_draft()
    offer(attachments, [make_candidate(sequence)], 0.0)
    commit(attachments, sequence, (5,), was_verified=True)
    for step in range(MISSES_UNTIL_COLD):
        attachment.timeout.missed(float(step))
    attachments.readiness.begin_rounds([sequence])
    assignment = attachments.assignments.get(sequence.sequence_id)
    assert assignment is not None
    assert assignment.verdict_s is not None
    assert attachment.timeout.is_cold
    offer(attachments, [make_candidate(sequence, round=0)], assignment.verdict_s + 0.004)
    assert attachment.timeout.is_cold, "it is for the round before"
    offer(attachments, [make_candidate(sequence)], assignment.verdict_s + 0.004)
    assert not attachment.timeout.is_cold
    assert attachment.timeout.response_s == pytest.approx(0.004)
    assert assignment.candidate is None, "the round is under way without it"


def test_candidate_that_comes_twice_says_once_how_fast_the_draft_is() -> None:
    attachments, attachment, sequence = with_one_draft()
    offer(attachments, [make_candidate(sequence)], 0.0)
    commit(attachments, sequence, (5,), was_verified=True)
    assignment = attachments.assignments.get(sequence.sequence_id)
    assert assignment is not None
    assert assignment.verdict_s is not None
    offer(attachments, [make_candidate(sequence)], assignment.verdict_s + 0.004)
    attachments.readiness.begin_rounds([sequence])
    offer(attachments, [make_candidate(sequence)], assignment.verdict_s + 5.0)
    assert attachment.timeout.response_s == pytest.approx(0.004)
    assert assignment.late_candidate is None
    assert attachment.counters.num_stale_candidates == 1


def test_candidate_pushed_ahead_that_comes_after_its_verdict_is_taken() -> None:
    attachments, attachment, sequence = with_one_draft()
    offer(attachments, [Candidate(1, 0, 2, TREE, candidate_id=1)], 0.0)
    commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    late = TokenTree.chain([7])
    offer(attachments, [pushed_ahead(Condition(0, 8, 1)), pushed_ahead(Condition(None, 9, 1))], 0.1)
    assert not attachments.readiness.is_ready(sequence, 0.1), "neither is for that verdict"
    assert attachment.counters.num_stale_candidates == 2
    offer(attachments, [pushed_ahead(Condition(0, 9, 1), late)], 0.1)
    assert attachments.readiness.is_ready(sequence, 0.1)
    assert attachments.assignments.tree(sequence) == late
    assert attachment.outcomes.num_late_hits == 1
    commit(attachments, sequence, (4,), was_verified=True)
    offer(attachments, [pushed_ahead(Condition(0, 9, 1), late)], 0.2)
    assert attachments.assignments.tree(sequence) == EMPTY_TREE, "that verdict is two rounds old"


def test_tree_that_comes_while_its_round_is_computed_is_stale() -> None:
    attachments, attachment, sequence = with_one_draft()
    attachments.drafts.take_messages()
    offer(attachments, [Candidate(1, 0, 2, TREE, candidate_id=1)], 0.0)
    attachments.readiness.begin_rounds([sequence])
    offer(attachments, [Candidate(1, 0, 2, TokenTree.chain([8]), candidate_id=2)], 0.0)
    offer(attachments, [pushed_ahead(Condition(0, 9, 1), candidate_id=3)], 0.0)
    assert attachments.assignments.tree(sequence) == TREE
    assert attachment.counters.num_stale_candidates == 1
    commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    [(_, message)] = attachments.drafts.take_messages()
    assert message.verdicts[0].candidate_id == 1
    assert message.verdicts[0].next_candidate_id == 3
