"""Trees of the target's own change nothing either, and stand in only where they should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.target.fallback import MAX_TOKENS_AT_ONCE, NgramFallback, own_tree
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
    run_plain,
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
    return Sequence(sequence_id, request(tokens, speculation_disabled=disabled), LIMITS)


@pytest.mark.parametrize(
    ("sampling", "with_draft"),
    [
        *((each, True) for each in SAMPLINGS.values()),
        (next(iter(SAMPLINGS.values())), False),
    ],
)
def test_output_is_the_plain_one(
    decoder: Decoder, sampling: SamplingParams, with_draft: bool
) -> None:
    requests = [
        request(prompt, replace(sampling, seed=sampling.seed + i), StopParams(60))
        for i, prompt in enumerate(PROMPTS)
    ]
    plain = run_plain(decoder, requests)
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
    fallback = NgramFallback()
    assert own_tree(_sequence([1, 2, 1, 2, 1], disabled=True), fallback) == EMPTY_TREE
    assert own_tree(_sequence([1, 2, 1, 2, 1, 2], 2), fallback).token_ids


def test_a_miss_delays_no_other_sequence(decoder: Decoder) -> None:
    """Of two sequences one never gets a tree; its draft is waited for, the other goes on."""
    steps: list[int] = []
    engine = build_engine(decoder, on_step=lambda report: steps.append(report.num_rounds))
    answer = run_plain(decoder, [request(PROMPTS[0], stop=StopParams(30))]).token_ids(0)
    whole = [*PROMPTS[0], *answer]

    def tree(tokens: list[int]) -> TokenTree:
        return TokenTree.chain(whole[len(tokens) : len(tokens) + 3])

    draft = ScriptedDraft(engine, tree, wait_s=30.0)
    draft.disturb = lambda batch: [each for each in batch if each.sequence_id == 1]
    draft.attach()
    requests = [request(prompt, stop=StopParams(30)) for prompt in PROMPTS[:2]]
    answers = run(engine, requests)
    plain = run_plain(decoder, requests)
    assert [answers.token_ids(i) for i in range(2)] == [plain.token_ids(i) for i in range(2)]
    # The first ends in the rounds its trees need: the prompt's token, then 4 a round.
    assert len(answers.events[0]) <= 2 + 1 + 8
    assert 1 in steps, "the two never stepped apart"


def test_texts_of_another_salt_give_no_trees() -> None:
    fallback, text = NgramFallback(), [1, 2, 3, 4, 5, 6]
    for number, salt in enumerate(("", "mine", "yours")):
        first = request(text)
        own = Sequence(10 * number, replace(first, cache_salt=salt), LIMITS)
        assert not fallback.tree(own).token_ids
        again = request(text[:3])
        seen = Sequence(10 * number + 1, replace(again, cache_salt=salt), LIMITS)
        assert fallback.tree(seen).token_ids[0] == 4
