"""A verdict says what was accepted, and picks what was pushed ahead for it."""

from __future__ import annotations

from dataclasses import replace

from shared.tokens import EMPTY_TREE, Candidate, Condition, Outcome, TokenTree, TreeShape
from tests.helpers.one_draft import (
    TREE,
    commit,
    make_candidate,
    offer,
    pushed_ahead,
    with_one_draft,
)


def test_verdict_names_path_tokens_and_round() -> None:
    attachments, _, sequence = with_one_draft()
    attachments.drafts.take_messages()
    offer(attachments, [make_candidate(sequence)], 0.0)
    commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    [(_, message)] = attachments.drafts.take_messages()
    [verdict] = message.verdicts
    assert verdict.outcome is Outcome.VERIFIED
    assert verdict.round == 0
    assert verdict.accepted_node_indices == (0,)
    assert verdict.committed_token_ids == (5, 9)
    assert verdict.committed_token_count == 4


def test_candidate_pushed_ahead_is_selected_by_node_and_bonus_token() -> None:
    attachments, _, sequence = with_one_draft()
    offer(attachments, [make_candidate(sequence)], 0.0)
    hit, miss = TokenTree.chain([7]), TokenTree.chain([8])
    for condition, tree in ((Condition(0, 9), hit), (Condition(0, 10), miss)):
        offer(attachments, [Candidate(1, 0, 2, tree, condition)], 0.0)
    commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    assert attachments.assignments.tree(sequence) == hit
    assert attachments.readiness.is_ready(sequence, 0.0)
    [(_, message)] = attachments.drafts.take_messages()
    assert message.verdicts[0].outcome is Outcome.VERIFIED_NEXT_READY


def test_candidate_pushed_ahead_for_another_verdict_is_dropped() -> None:
    attachments, _, sequence = with_one_draft()
    offer(attachments, [make_candidate(sequence)], 0.0)
    offer(attachments, [Candidate(1, 0, 2, TREE, Condition(0, 10))], 0.0)
    commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    assert attachments.assignments.tree(sequence) == EMPTY_TREE


def test_verdict_names_the_candidates_verified_and_selected() -> None:
    attachments, attachment, sequence = with_one_draft()
    attachments.drafts.take_messages()
    offer(attachments, [Candidate(1, 0, 2, TREE, candidate_id=1)], 0.0)
    offer(
        attachments,
        [pushed_ahead(Condition(0, 8, 1)), pushed_ahead(Condition(0, 9, 1), TREE, 3)],
        0.0,
    )
    commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    [(_, message)] = attachments.drafts.take_messages()
    [verdict] = message.verdicts
    assert (verdict.candidate_id, verdict.next_candidate_id) == (1, 3)
    assert attachment.outcomes.hits == {(1, 1): 1}


BRANCHES = TokenTree((5, 6, 7, 8), (None, None, 1, 1), (-2.0, -0.5, -0.9, -0.1))


def test_of_a_narrowed_tree_draft_hears_nodes_as_it_has_sent_them() -> None:
    attachments, _, sequence = with_one_draft(num_draft_tokens=3)
    attachments.drafts.take_messages()
    offer(attachments, [Candidate(1, 0, 2, BRANCHES, candidate_id=1)], 0.0)
    assert attachments.assignments.tree(sequence) == BRANCHES.only((1, 3))
    # Those that it had counted in the part that is verified would select another one.
    for node, tree in ((3, BRANCHES), (1, TREE)):
        offer(attachments, [pushed_ahead(Condition(node, 9, 1), tree, node)], 0.0)
    commit(attachments, sequence, (6, 8, 9), accepted=(0, 1), was_verified=True)
    [(_, message)] = attachments.drafts.take_messages()
    [verdict] = message.verdicts
    assert verdict.accepted_node_indices == (1, 3)
    assert (verdict.candidate_id, verdict.next_candidate_id) == (1, 3)
    assert attachments.assignments.tree(sequence) == BRANCHES.only((1, 3))


def test_a_tree_that_comes_late_for_its_verdict_is_narrowed_too() -> None:
    attachments, _, sequence = with_one_draft(num_draft_tokens=2)
    offer(attachments, [Candidate(1, 0, 2, BRANCHES, candidate_id=1)], 0.0)
    commit(attachments, sequence, (6, 9), accepted=(0,), was_verified=True)
    offer(attachments, [pushed_ahead(Condition(1, 9, 1), BRANCHES, 2)], 0.0)
    assert attachments.assignments.tree(sequence) == BRANCHES.only((1,))


def test_condition_on_another_tree_is_not_selected() -> None:
    attachments, attachment, sequence = with_one_draft()
    offer(attachments, [Candidate(1, 0, 2, TREE, candidate_id=1)], 0.0)
    offer(attachments, [pushed_ahead(Condition(0, 9, 7))], 0.0)
    commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    assert attachments.assignments.tree(sequence) == EMPTY_TREE
    assert attachment.outcomes.misses == {1: 1}


def test_a_round_counts_for_the_shape_that_was_verified() -> None:
    """While a draft prepares for the requested shape it sends trees of another one."""
    attachments, attachment, sequence = with_one_draft()
    policy, sent = attachment.policy, TreeShape(2, 1, 3)
    policy._num_cold = 0
    commit(attachments, sequence, (9,), now_s=1.0)  # it follows the prompt
    policy.turn(1, 1.0)
    for now_s, has_tree in ((2.0, True), (3.0, False)):
        if has_tree:
            candidate = make_candidate(sequence)
            offer(attachments, [replace(candidate, shape=sent)], now_s)
        accepted = (0,) if has_tree else ()
        commit(attachments, sequence, (5, 9), accepted=accepted, was_verified=has_tree, now_s=now_s)
        policy.turn(1, now_s)
    assert policy.times.measured() == {(sent, 1): 1.0, (policy.base, 1): 1.0}


def test_a_round_that_began_with_a_draft_is_no_plain_step() -> None:
    attachments, attachment, sequence = with_one_draft()
    policy = attachment.policy
    commit(attachments, sequence, (9,), now_s=1.0)
    attachments.assignments.release("a", [1], 1.5)
    for now_s, measured in ((9.0, {}), (9.25, {(None, 1): 0.25})):
        commit(attachments, sequence, (9,), now_s=now_s)
        policy.turn(1, now_s)
        assert policy.times.measured() == measured
