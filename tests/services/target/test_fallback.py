"""Trees of the target's own change nothing either, and stand in only where they should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.target.fallback import MAX_TOKENS_AT_ONCE, NgramFallback
from services.target.fallback_order import FEWEST_ROUNDS, ROUNDS_A_PROBE, FallbackOrder
from services.target.requests.request import ModelLimits
from services.target.sequence import Sequence
from services.target.step_report import StepReport
from shared.models.decoder import Decoder
from shared.tokens import EMPTY_TREE, SamplingParams, StopParams, TokenTree
from tests.helpers.engines import (
    ScriptedDraft,
    build_engine,
    random_trees,
    request,
    run,
    shuffled_drops,
    tiny_decoder,
)

PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [3, 3, 3, 3, 3, 3, 3, 3])
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(seed=7),
    "penalised": SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3, seed=2),
}
LIMITS = ModelLimits(1000, 2000, 2000, frozenset())


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def _sequence(tokens: list[int], sequence_id: int = 1, *, disabled: bool = False) -> Sequence:
    return Sequence.of(sequence_id, request(tokens, speculation_disabled=disabled), LIMITS)


@pytest.mark.parametrize("with_draft", [False, True], ids=["alone", "beside a draft"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_output_is_the_plain_one(
    decoder: Decoder, sampling: SamplingParams, with_draft: bool
) -> None:
    requests = [
        request(prompt, replace(sampling, seed=sampling.seed + i), StopParams(60))
        for i, prompt in enumerate(PROMPTS)
    ]
    plain = run(build_engine(decoder), requests)
    reports: list[StepReport] = []
    engine = build_engine(decoder, fallback=NgramFallback(), on_step=reports.append)
    if with_draft:
        ScriptedDraft(engine, random_trees(3), disturb=shuffled_drops(5)).attach()
    for _ in range(2):  # the second time each answer has been seen
        reports.clear()
        answers = run(engine, requests)
        assert [answers.token_ids(i) for i in range(3)] == [plain.token_ids(i) for i in range(3)]
    assert sum(report.num_accepted for report in reports) > 60
    num_rounds = sum(report.num_fallback_rounds for report in reports)
    num_tokens = sum(report.num_fallback_committed for report in reports)
    assert num_tokens > num_rounds > 0
    if not with_draft:
        accepted = sum(report.num_accepted for report in reports)
        assert abs(num_tokens - num_rounds - accepted) <= len(PROMPTS), "but where outputs end"


def test_draft_is_not_told_of_the_targets_own_nodes(decoder: Decoder) -> None:
    engine = build_engine(decoder, fallback=NgramFallback())
    draft = ScriptedDraft(engine, lambda tokens: EMPTY_TREE)
    verdicts = []
    send = draft.send

    def record(message):  # type: ignore[no-untyped-def]
        verdicts.extend(message.verdicts)
        return send(message)

    draft.send = record  # type: ignore[method-assign]
    draft.attach()
    for _ in range(2):
        run(engine, [request(PROMPTS[0], stop=StopParams(40))])
    assert any(len(verdict.committed_token_ids) > 2 for verdict in verdicts)
    assert all(verdict.accepted_node_indices == () for verdict in verdicts)
    assert all(verdict.candidate_id is None for verdict in verdicts)


def test_tree_repeats_what_followed_before() -> None:
    fallback = NgramFallback()
    period = [1, 2, 3, 4, 5]
    tree = fallback.tree(_sequence([*period, *period, 1, 2]))
    assert tree.token_ids[:3] == (3, 4, 5)
    assert fallback.tree(_sequence([7, 8, 9], 2)) == EMPTY_TREE


def test_long_prompt_is_taken_in_over_several_steps() -> None:
    fallback, period = NgramFallback(), [1, 2, 3, 4, 5]
    sequence = _sequence(period * (MAX_TOKENS_AT_ONCE // 2))
    found = [bool(fallback.tree(sequence).token_ids) for _ in range(4)]
    assert found == [False, False, True, True]


def test_request_without_speculation_gets_none() -> None:
    fallback_order = FallbackOrder(NgramFallback())
    assert fallback_order.tree(_sequence([1, 2, 1, 2, 1], disabled=True)) == EMPTY_TREE
    assert fallback_order.tree(_sequence([1, 2, 1, 2, 1, 2], 2)).token_ids


def _fallback_order(drafted: int, local: int, step_s: float) -> FallbackOrder:
    fallback_order = FallbackOrder(NgramFallback())
    fallback_order.stepped(step_s)
    fallback_order.counted(local, is_local=True)
    return _judged(fallback_order, drafted)


def _judged(fallback_order: FallbackOrder, drafted: int) -> FallbackOrder:
    """Shows as many rounds of a draft as it is judged by."""
    for _ in range(FEWEST_ROUNDS):
        fallback_order.counted(drafted, is_local=False)
    return fallback_order


@pytest.mark.parametrize(
    ("drafted", "response_s", "expected"), [(4, 0.5, True), (4, 2.0, False), (2, 0.0, True)]
)
def test_draft_is_waited_for_when_that_promises_more_tokens_a_second(
    drafted: int, response_s: float, expected: bool
) -> None:
    # The target's own trees bring 2 tokens a second.
    fallback_order = _fallback_order(drafted, local=2, step_s=1.0)
    assert fallback_order.waits(_sequence([1, 2, 1, 2, 1, 2]), response_s) is expected


def test_draft_is_waited_for_where_the_target_has_no_tree() -> None:
    fallback_order = _fallback_order(1, local=2, step_s=1.0)
    assert fallback_order.waits(_sequence([1, 2, 3]), 100.0)
    assert FallbackOrder().waits(_sequence([1, 2, 1, 2, 1, 2]), 100.0)


def test_draft_that_does_not_pay_is_tried_again_now_and_then() -> None:
    fallback_order, sequence = (
        _fallback_order(1, local=2, step_s=1.0),
        _sequence([1, 2, 1, 2, 1, 2]),
    )
    waits = [fallback_order.waits(sequence, 0.5) for _ in range(2 * ROUNDS_A_PROBE)]
    assert waits.count(True) == 2


@pytest.mark.parametrize(
    ("response_s", "expected"), [(None, True), (2.9, True), (3.1, False)], ids=str
)
def test_draft_is_waited_for_while_that_is_faster_than_plain_steps(
    response_s: float | None, expected: bool
) -> None:
    # Four tokens a round, and a second for a step.
    fallback_order, sequence = _judged(FallbackOrder(waits_always=False), 4), _sequence([1, 2, 3])
    assert fallback_order.waits(sequence, response_s)
    fallback_order.stepped(1.0)
    assert fallback_order.waits(sequence, response_s) is expected


@pytest.mark.parametrize(("round_s", "expected"), [(3.9, True), (4.1, False)])
def test_rounds_are_held_to_plain_steps_of_as_many_sequences(
    round_s: float, expected: bool
) -> None:
    """Not to the steps of the moment, which verify trees, nor by the wait alone."""
    fallback_order, sequence = _judged(FallbackOrder(waits_always=False), 4), _sequence([1, 2, 3])
    fallback_order.took_plain(1.0, 40)
    fallback_order.took_plain(0.1, 3)
    for _ in range(50):
        fallback_order.stepped(9.0)
    fallback_order.took(round_s)
    assert fallback_order.waits(sequence, 0.1, num_sequences=50) is expected
    fallback_order.doubt()
    assert fallback_order.waits(sequence, 0.1, num_sequences=50), "a trial begins"


def test_a_draft_is_not_judged_by_a_few_rounds() -> None:
    fallback_order, sequence = FallbackOrder(waits_always=False), _sequence([1, 2, 3])
    fallback_order.stepped(1.0)
    for _ in range(FEWEST_ROUNDS - 1):
        fallback_order.counted(1, is_local=False)
        assert fallback_order.waits(sequence, 0.5)
    fallback_order.counted(1, is_local=False)
    assert not fallback_order.waits(sequence, 0.5)
    # What it brings from then on counts as much as that.
    for _ in range(FEWEST_ROUNDS):
        fallback_order.counted(3, is_local=False)
    assert fallback_order.waits(sequence, 0.5)


def test_a_draft_that_seldom_answers_is_worth_less() -> None:
    fallback_order, sequence = _judged(FallbackOrder(waits_always=False), 4), _sequence([1, 2, 3])
    fallback_order.stepped(1.0)
    assert fallback_order.waits(sequence, 1.4, 0.5)
    assert not fallback_order.waits(sequence, 1.6, 0.5)


def test_the_slower_a_draft_the_rarer_it_is_tried_again() -> None:
    fallback_order, sequence = _judged(FallbackOrder(waits_always=False), 4), _sequence([1, 2, 3])
    fallback_order.stepped(1.0)
    waits = [fallback_order.waits(sequence, 40.0) for _ in range(2000)]
    # At most 4 % of the time: each of them costs 40 steps.
    assert waits.count(True) == 2


def test_a_miss_delays_no_other_sequence(decoder: Decoder) -> None:
    """Of two sequences one never gets a tree; its draft is waited for, the other goes on."""
    steps: list[int] = []
    engine = build_engine(decoder, on_step=lambda report: steps.append(report.num_rounds))
    answer = run(build_engine(decoder), [request(PROMPTS[0], stop=StopParams(30))]).token_ids(0)
    whole = [*PROMPTS[0], *answer]

    def tree(tokens: list[int]) -> TokenTree:
        return TokenTree.chain(whole[len(tokens) : len(tokens) + 3])

    draft = ScriptedDraft(engine, tree, wait_s=30.0)
    draft.disturb = lambda batch: [each for each in batch if each.sequence_id == 1]
    draft.attach()
    requests = [request(prompt, stop=StopParams(30)) for prompt in PROMPTS[:2]]
    answers = run(engine, requests)
    plain = run(build_engine(decoder), requests)
    assert [answers.token_ids(i) for i in range(2)] == [plain.token_ids(i) for i in range(2)]
    # The first ends in the rounds its trees need: the prompt's token, then 4 a round.
    assert len(answers.events[0]) <= 2 + 1 + 8
    assert 1 in steps, "the two never stepped apart"


def test_texts_of_another_salt_give_no_trees() -> None:
    fallback, text = NgramFallback(), [1, 2, 3, 4, 5, 6]
    for number, salt in enumerate(("", "mine", "yours")):
        first = request(text)
        own = Sequence.of(10 * number, replace(first, cache_salt=salt), LIMITS)
        assert not fallback.tree(own).token_ids
        again = request(text[:3])
        seen = Sequence.of(10 * number + 1, replace(again, cache_salt=salt), LIMITS)
        assert fallback.tree(seen).token_ids[0] == 4
