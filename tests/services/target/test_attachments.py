"""Whatever a draft does, only a tree for exactly the current state is ever verified."""

from __future__ import annotations

from services.target.attachment import Attachment, DraftIdentity, DraftMessage
from services.target.attachments import Attachments
from services.target.patience import FIRST_PROBE_S, MISSES_UNTIL_COLD, Patience
from services.target.request import GenerationRequest, ModelLimits
from services.target.sequence import Sequence
from shared.tokens import (
    EMPTY_TREE,
    Candidate,
    Condition,
    Outcome,
    SamplingParams,
    StopParams,
    TokenTree,
)

LIMITS = ModelLimits(1000, 1000, 1000, frozenset())
TREE = TokenTree.chain([5, 6])


class _Port:
    def __init__(self) -> None:
        self.messages: list[DraftMessage] = []
        self.closed = False

    def send(self, message: DraftMessage) -> bool:
        self.messages.append(message)
        return True

    def close(self) -> None:
        self.closed = True


def _attachment(name: str = "a", max_sequences: int = 8, wait_s: float = 1.0) -> Attachment:
    identity = DraftIdentity(name, f"worker-{name}", "m", "NGRAM", max_sequences, 0.0)
    return Attachment(identity, _Port(), Patience(wait_s))


def _sequence(sequence_id: int = 1, *, disabled: bool = False) -> Sequence:
    request = GenerationRequest(
        "r", (1, 2), SamplingParams(seed=3), StopParams(50), 0.0, speculation_disabled=disabled
    )
    return Sequence.of(sequence_id, request, LIMITS)


def _with_one(wait_s: float = 1.0) -> tuple[Attachments, Attachment, Sequence]:
    attachments, attachment, sequence = Attachments(), _attachment(wait_s=wait_s), _sequence()
    attachments.attach(attachment, [sequence], 0.0)
    return attachments, attachment, sequence


def _commit(
    attachments: Attachments,
    sequence: Sequence,
    tokens: tuple[int, ...],
    *,
    accepted: tuple[int, ...] = (),
    was_verified: bool = False,
    now_s: float = 0.0,
) -> None:
    sequence.commit(tokens)
    attachments.count_round(sequence, len(accepted), was_verified=was_verified, now_s=now_s)
    attachments.decided(sequence, tokens, accepted, was_verified=was_verified, now_s=now_s)


def _candidate(sequence: Sequence, tree: TokenTree = TREE, **changes: int) -> Candidate:
    fence = {"round": sequence.round, "committed_token_count": len(sequence.token_ids)}
    fence.update(changes)
    return Candidate(sequence.sequence_id, fence["round"], fence["committed_token_count"], tree)


def test_attached_draft_is_handed_running_sequences_with_all_tokens() -> None:
    attachments, attachment, sequence = _with_one()
    [(_, message)] = attachments.take_messages()
    assert message.opened[0].token_ids == (1, 2)
    assert message.opened[0].sampling.seed == 3
    assert attachment.sequence_ids == {sequence.sequence_id}


def test_matching_candidate_is_offered_for_the_round() -> None:
    attachments, _, sequence = _with_one()
    attachments.offer("a", [_candidate(sequence)], 0.0)
    assert attachments.candidate_tree(sequence) == TREE


def test_stale_round_is_not_verified() -> None:
    attachments, attachment, sequence = _with_one()
    _commit(attachments, sequence, (4,))
    attachments.offer("a", [_candidate(sequence, round=0)], 0.0)
    assert attachments.candidate_tree(sequence) == EMPTY_TREE
    assert attachment.counters.num_stale_candidates == 1


def test_wrong_committed_count_is_not_verified() -> None:
    attachments, _, sequence = _with_one()
    attachments.offer("a", [_candidate(sequence, committed_token_count=1)], 0.0)
    assert attachments.candidate_tree(sequence) == EMPTY_TREE


def test_duplicate_candidate_is_verified_once() -> None:
    attachments, _, sequence = _with_one()
    candidate = _candidate(sequence)
    attachments.offer("a", [candidate, candidate], 0.0)
    _commit(attachments, sequence, (5,), was_verified=True)
    attachments.offer("a", [candidate], 0.0)
    assert attachments.candidate_tree(sequence) == EMPTY_TREE


def test_candidate_of_a_draft_that_left_is_dropped() -> None:
    attachments, _, sequence = _with_one()
    attachments.detach("a", 0.0)
    attachments.offer("a", [_candidate(sequence)], 0.0)
    assert attachments.candidate_tree(sequence) == EMPTY_TREE
    assert attachments.is_ready(sequence, 0.0)


def test_unknown_sequence_is_dropped() -> None:
    attachments, attachment, _ = _with_one()
    attachments.offer("a", [_candidate(_sequence(77))], 0.0)
    assert attachment.counters.num_stale_candidates == 1


def test_sequences_of_a_lost_draft_move_to_another() -> None:
    attachments, _, sequence = _with_one()
    other = _attachment("b")
    attachments.attach(other, [], 0.0)
    attachments.detach("a", 0.0)
    assert other.sequence_ids == {sequence.sequence_id}


def test_sequences_spread_and_capacity_holds() -> None:
    attachments = Attachments()
    small, large = _attachment("a", max_sequences=1), _attachment("b")
    attachments.attach(small, [], 0.0)
    attachments.attach(large, [_sequence(i) for i in range(5)], 0.0)
    assert len(small.sequence_ids) == 1
    assert len(large.sequence_ids) == 4


def test_released_sequence_is_not_handed_back_to_the_same_draft() -> None:
    attachments, attachment, sequence = _with_one()
    attachments.release("a", [sequence.sequence_id], 0.0)
    assert not attachment.sequence_ids
    attachments.assign(sequence, 0.0)
    assert not attachment.sequence_ids


def test_request_without_speculation_is_not_assigned() -> None:
    attachments, attachment = Attachments(), _attachment()
    attachments.attach(attachment, [_sequence(disabled=True)], 0.0)
    assert not attachment.sequence_ids


def test_sequence_waits_for_its_candidate_until_the_deadline() -> None:
    attachments, _, sequence = _with_one(wait_s=1.0)
    assert attachments.is_ready(sequence, 0.0), "the first tree is never waited for"
    _commit(attachments, sequence, (4,), now_s=10.0)
    assert not attachments.is_ready(sequence, 10.5)
    assert attachments.is_ready(sequence, 11.0)
    attachments.offer("a", [_candidate(sequence)], 10.6)
    assert attachments.is_ready(sequence, 10.6)


def test_empty_tree_ends_the_wait() -> None:
    attachments, _, sequence = _with_one()
    _commit(attachments, sequence, (4,))
    attachments.offer("a", [_candidate(sequence, EMPTY_TREE)], 0.1)
    assert attachments.is_ready(sequence, 0.1)
    assert attachments.candidate_tree(sequence) == EMPTY_TREE


def test_verdict_names_path_tokens_and_round() -> None:
    attachments, _, sequence = _with_one()
    attachments.take_messages()
    attachments.offer("a", [_candidate(sequence)], 0.0)
    _commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    [(_, message)] = attachments.take_messages()
    [verdict] = message.verdicts
    assert verdict.outcome is Outcome.VERIFIED
    assert verdict.round == 0
    assert verdict.accepted_node_indices == (0,)
    assert verdict.committed_token_ids == (5, 9)
    assert verdict.committed_token_count == 4


def test_candidate_pushed_ahead_is_selected_by_node_and_bonus_token() -> None:
    attachments, _, sequence = _with_one()
    attachments.offer("a", [_candidate(sequence)], 0.0)
    hit, miss = TokenTree.chain([7]), TokenTree.chain([8])
    for condition, tree in ((Condition(0, 9), hit), (Condition(0, 10), miss)):
        attachments.offer("a", [Candidate(1, 0, 2, tree, condition)], 0.0)
    _commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    assert attachments.candidate_tree(sequence) == hit
    assert attachments.is_ready(sequence, 0.0)
    [(_, message)] = attachments.take_messages()
    assert message.verdicts[0].outcome is Outcome.VERIFIED_NEXT_READY


def test_candidate_pushed_ahead_for_another_verdict_is_dropped() -> None:
    attachments, _, sequence = _with_one()
    attachments.offer("a", [_candidate(sequence)], 0.0)
    attachments.offer("a", [Candidate(1, 0, 2, TREE, Condition(0, 10))], 0.0)
    _commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    assert attachments.candidate_tree(sequence) == EMPTY_TREE


def _pushed(condition: Condition, tree: TokenTree = TREE, candidate_id: int = 2) -> Candidate:
    return Candidate(1, 0, 2, tree, condition, candidate_id)


def test_verdict_names_the_candidates_verified_and_selected() -> None:
    attachments, attachment, sequence = _with_one()
    attachments.take_messages()
    attachments.offer("a", [Candidate(1, 0, 2, TREE, candidate_id=1)], 0.0)
    attachments.offer("a", [_pushed(Condition(0, 8, 1)), _pushed(Condition(0, 9, 1), TREE, 3)], 0.0)
    _commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    [(_, message)] = attachments.take_messages()
    [verdict] = message.verdicts
    assert (verdict.candidate_id, verdict.next_candidate_id) == (1, 3)
    assert attachment.outcomes.hits == {(1, 1): 1}


def test_condition_on_another_tree_is_not_selected() -> None:
    attachments, attachment, sequence = _with_one()
    attachments.offer("a", [Candidate(1, 0, 2, TREE, candidate_id=1)], 0.0)
    attachments.offer("a", [_pushed(Condition(0, 9, 7))], 0.0)
    _commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    assert attachments.candidate_tree(sequence) == EMPTY_TREE
    assert attachment.outcomes.misses == {1: 1}


def test_candidate_pushed_ahead_that_comes_after_its_verdict_is_taken() -> None:
    attachments, attachment, sequence = _with_one()
    attachments.offer("a", [Candidate(1, 0, 2, TREE, candidate_id=1)], 0.0)
    _commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    late = TokenTree.chain([7])
    attachments.offer("a", [_pushed(Condition(0, 8, 1)), _pushed(Condition(None, 9, 1))], 0.1)
    assert not attachments.is_ready(sequence, 0.1), "neither is for that verdict"
    assert attachment.counters.num_stale_candidates == 2
    attachments.offer("a", [_pushed(Condition(0, 9, 1), late)], 0.1)
    assert attachments.is_ready(sequence, 0.1)
    assert attachments.candidate_tree(sequence) == late
    assert attachment.outcomes.num_late_hits == 1
    _commit(attachments, sequence, (4,), was_verified=True)
    attachments.offer("a", [_pushed(Condition(0, 9, 1), late)], 0.2)
    assert attachments.candidate_tree(sequence) == EMPTY_TREE, "that verdict is two rounds old"


def test_tree_that_comes_while_its_round_is_computed_is_stale() -> None:
    attachments, attachment, sequence = _with_one()
    attachments.take_messages()
    attachments.offer("a", [Candidate(1, 0, 2, TREE, candidate_id=1)], 0.0)
    attachments.begin_rounds([sequence])
    attachments.offer("a", [Candidate(1, 0, 2, TokenTree.chain([8]), candidate_id=2)], 0.0)
    attachments.offer("a", [_pushed(Condition(0, 9, 1), candidate_id=3)], 0.0)
    assert attachments.candidate_tree(sequence) == TREE
    assert attachment.counters.num_stale_candidates == 1
    _commit(attachments, sequence, (5, 9), accepted=(0,), was_verified=True)
    [(_, message)] = attachments.take_messages()
    assert message.verdicts[0].candidate_id == 1
    assert message.verdicts[0].next_candidate_id == 3


def test_closed_sequence_is_told_once() -> None:
    attachments, attachment, sequence = _with_one()
    attachments.close(sequence)
    attachments.close(sequence)
    [(_, message)] = attachments.take_messages()
    assert message.closed == (1,)
    assert not attachment.sequence_ids


def test_silent_draft_is_waited_for_only_now_and_then() -> None:
    patience = Patience(0.1)
    for step in range(MISSES_UNTIL_COLD):
        assert patience.deadline_s(float(step)) > step
        patience.missed(step + 0.1)
    now_s = 100.0
    assert patience.deadline_s(now_s) == now_s + 0.1
    assert patience.deadline_s(now_s + 0.01) == now_s + 0.01
    assert patience.deadline_s(now_s + FIRST_PROBE_S) > now_s + FIRST_PROBE_S
    assert patience.deadline_s(now_s + 2 * FIRST_PROBE_S) == now_s + 2 * FIRST_PROBE_S


def test_draft_that_answers_again_is_waited_for_again() -> None:
    patience = Patience(0.1)
    for step in range(MISSES_UNTIL_COLD):
        patience.missed(float(step))
    assert patience.is_cold
    patience.heard(0.01)
    assert patience.deadline_s(5.0) > 5.0


def test_wait_follows_the_usual_response_time_within_its_bound() -> None:
    patience = Patience(0.1)
    for _ in range(50):
        patience.heard(0.02)
    assert 0.07 < patience.wait_s < 0.09
    for _ in range(50):
        patience.heard(1.0)
    assert patience.wait_s == 0.1


def test_rounds_of_one_step_count_as_one_miss() -> None:
    patience = Patience(0.1)
    for _ in range(MISSES_UNTIL_COLD):
        patience.missed(1.0)
    assert not patience.is_cold
