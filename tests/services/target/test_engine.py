"""The losslessness ladder: whatever drafts do, the output is that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.target.engine import Engine
from services.target.requests.request import Finished, GenerationRequest
from services.target.step_report import StepReport
from services.target.verifier import VerificationMode
from shared.generation import Started
from shared.models.decoder import Decoder
from shared.tokens import FinishReason, SamplingParams, StopParams, TokenTree
from tests.helpers.engines import (
    VOCAB_SIZE,
    Collector,
    Proposal,
    ScriptedDraft,
    build_engine,
    oracle_trees,
    random_trees,
    request,
    run,
    settle,
    shuffled_drops,
    tiny_decoder,
)
from tests.helpers.plain_forward import plain_forward

PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11], [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(seed=7),
    "truncated": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, seed=1),
    "penalised": SamplingParams(
        frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3, seed=2
    ),
    "penalised greedy": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "biased": SamplingParams(logit_bias={3: 2.0, 5: -100.0}, seed=3),
}


@pytest.fixture(params=[True, False], ids=["overlap", "in turn"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def _requests(sampling: SamplingParams, stop: StopParams | None = None) -> list[GenerationRequest]:
    return [
        request(prompt, replace(sampling, seed=sampling.seed + i), stop)
        for i, prompt in enumerate(PROMPTS)
    ]


def _outputs(collector: Collector) -> list[list[int]]:
    return [collector.token_ids(key) for key in range(len(PROMPTS))]


def _plain(decoder: Decoder, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Returns the outputs of the plainest engine: no drafts, and a step after the other."""
    return _outputs(run(build_engine(decoder, overlaps=False), requests))


def _wholes(outputs: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]


def _scripts(outputs: Sequence[Sequence[int]]) -> dict[str, Proposal]:
    wholes = _wholes(outputs)
    always_wrong = lambda tokens: _wrong_chain(wholes, tokens)  # noqa: E731
    return {
        "perfect": oracle_trees(wholes, seed=0, quality=1.0),
        "half right": oracle_trees(wholes, seed=1, quality=0.5),
        "always wrong": always_wrong,
        "random": random_trees(seed=2),
    }


def _wrong_chain(wholes: Sequence[Sequence[int]], tokens: list[int]) -> TokenTree:
    known = next(w for w in wholes if list(w[: len(tokens)]) == tokens)
    rest = known[len(tokens) : len(tokens) + 3]
    return TokenTree.chain([(token + 1) % VOCAB_SIZE for token in rest])


@pytest.mark.parametrize("name", SAMPLINGS)
def test_output_is_that_of_plain_decoding_for_every_draft(
    decoder: Decoder, overlaps: bool, name: str
) -> None:
    requests = _requests(SAMPLINGS[name])
    expected = _plain(decoder, requests)
    for script_name, script in _scripts(expected).items():
        engine = build_engine(decoder, overlaps=overlaps)
        ScriptedDraft(engine, script).attach()
        collector = run(engine, requests)
        assert _outputs(collector) == expected, script_name
        stats = [collector.finished(key).stats for key in range(len(PROMPTS))]
        assert all(each.num_verified_rounds for each in stats), script_name


def test_perfect_draft_needs_few_rounds_and_wrong_one_accepts_nothing(decoder: Decoder) -> None:
    requests = _requests(SAMPLINGS["temperature 1"])
    expected = _plain(decoder, requests)
    scripts = _scripts(expected)
    engine = build_engine(decoder)
    ScriptedDraft(engine, scripts["perfect"]).attach()
    stats = run(engine, requests).finished(0).stats
    assert stats.num_verified_rounds <= 6
    assert stats.num_accepted + stats.num_rounds == 24
    assert sum(stats.histogram) == stats.num_verified_rounds
    engine = build_engine(decoder)
    ScriptedDraft(engine, scripts["always wrong"]).attach()
    stats = run(engine, requests).finished(0).stats
    assert stats.num_accepted == 0
    assert stats.histogram == [stats.num_verified_rounds]


@pytest.mark.parametrize("name", ["greedy", "temperature 1", "penalised"])
def test_drops_repeats_reordering_and_false_fences_change_nothing(
    decoder: Decoder, overlaps: bool, name: str
) -> None:
    requests = _requests(SAMPLINGS[name])
    expected = _plain(decoder, requests)
    for seed in range(2):
        engine = build_engine(decoder, overlaps=overlaps)
        script = oracle_trees(_wholes(expected), seed, quality=0.7)
        ScriptedDraft(engine, script, disturb=shuffled_drops(seed)).attach()
        assert _outputs(run(engine, requests)) == expected


def test_draft_that_vanishes_and_returns_changes_nothing(decoder: Decoder, overlaps: bool) -> None:
    requests = _requests(SAMPLINGS["temperature 1"])
    expected = _plain(decoder, requests)
    engine = build_engine(decoder, overlaps=overlaps)
    script = oracle_trees(_wholes(expected), 5, quality=0.6)
    first, second = (ScriptedDraft(engine, script, name=name) for name in ("first", "second"))
    actions = {2: first.attach, 5: first.detach, 9: second.attach}
    collector = run(engine, requests, each_step=lambda step: actions.get(step, lambda: None)())
    assert _outputs(collector) == expected
    assert collector.finished(0).stats.num_accepted > 0


def test_preemption_changes_nothing(decoder: Decoder, overlaps: bool) -> None:
    requests = _requests(SAMPLINGS["temperature 1"])
    expected = _plain(decoder, requests)
    reports: list[StepReport] = []
    engine = build_engine(decoder, overlaps=overlaps, num_pages=14, on_step=reports.append)
    ScriptedDraft(engine, oracle_trees(_wholes(expected), 5, quality=0.6)).attach()
    assert _outputs(run(engine, requests)) == expected
    assert sum(report.num_preempted for report in reports) > 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_prefix_cache_changes_nothing(decoder: Decoder, overlaps: bool, prefix_cache: bool) -> None:
    requests = _requests(SAMPLINGS["temperature 1"])
    expected = _plain(decoder, requests)
    engine = build_engine(decoder, overlaps=overlaps, prefix_cache=prefix_cache)
    script = oracle_trees(_wholes(expected), 5, quality=0.8)
    ScriptedDraft(engine, script).attach()
    run(engine, requests)
    again = run(engine, requests)
    assert _outputs(again) == expected
    assert (again.finished(3).num_cached_tokens == 8) is prefix_cache


def test_chunked_prefill_changes_nothing(decoder: Decoder, overlaps: bool) -> None:
    requests = _requests(SAMPLINGS["temperature 1"])
    expected = _plain(decoder, requests)
    assert (
        _outputs(run(build_engine(decoder, overlaps=overlaps, max_step_rows=3), requests))
        == expected
    )


def test_seeds_differ_and_repeat(decoder: Decoder) -> None:
    one, other = (request([1, 2, 3], SamplingParams(seed=seed)) for seed in (1, 2))
    outputs = run(build_engine(decoder), [one, other, one])
    assert outputs.token_ids(0) == outputs.token_ids(2)
    assert outputs.token_ids(0) != outputs.token_ids(1)


def test_stop_token_ends_inside_an_accepted_path(decoder: Decoder, overlaps: bool) -> None:
    [plain] = [run(build_engine(decoder, overlaps=overlaps), [request([1, 2, 3])]).token_ids(0)]
    stop = next(t for i, t in enumerate(plain) if i >= 2 and t not in plain[:i])
    stopped = request([1, 2, 3], stop=StopParams(24, stop_token_ids=frozenset({stop})))
    engine = build_engine(decoder, overlaps=overlaps)
    ScriptedDraft(engine, oracle_trees([[1, 2, 3, *plain]], 0, quality=1.0)).attach()
    collector = run(engine, [stopped])
    assert collector.token_ids(0) == plain[: plain.index(stop) + 1]
    assert collector.finished(0).reason is FinishReason.STOP
    assert collector.finished(0).stop_token_id == stop


def test_minimum_length_holds_at_every_depth(decoder: Decoder, overlaps: bool) -> None:
    eos = frozenset(range(0, VOCAB_SIZE, 2))
    requests = _requests(SAMPLINGS["temperature 1"], StopParams(20, min_output_tokens=9))
    expected = _outputs(run(build_engine(decoder, overlaps=overlaps, eos_token_ids=eos), requests))
    assert all(not eos & set(output[:9]) for output in expected)
    engine = build_engine(decoder, overlaps=overlaps, eos_token_ids=eos)
    ScriptedDraft(engine, oracle_trees(_wholes(expected), 0, quality=0.8)).attach()
    assert _outputs(run(engine, requests)) == expected


def test_context_limit_ends_generation(decoder: Decoder, overlaps: bool) -> None:
    engine = build_engine(decoder, overlaps=overlaps, max_context_tokens=10)
    ScriptedDraft(engine, random_trees(0)).attach()
    collector = run(engine, [request([1, 2, 3], stop=StopParams(1000))])
    assert len(collector.token_ids(0)) == 7
    assert collector.finished(0).reason is FinishReason.LENGTH


def test_logprobs_are_those_of_a_plain_forward(decoder: Decoder, overlaps: bool) -> None:
    prompt = [1, 2, 3]
    sampling = SamplingParams(temperature=0.7, top_k=5, frequency_penalty=0.5, seed=4)
    asked = request(prompt, sampling, top_logprobs=3)
    plain = run(build_engine(decoder, overlaps=overlaps), [asked])
    tokens = plain.token_ids(0)
    engine = build_engine(decoder, overlaps=overlaps)
    ScriptedDraft(engine, oracle_trees([[*prompt, *tokens]], 0, quality=0.7)).attach()
    collector = run(engine, [asked])
    assert collector.finished(0).stats.num_accepted > 0
    expected = _rescored(decoder, prompt, tokens)
    for found, token, row in zip(collector.logprobs(0), tokens, expected, strict=True):
        assert found.log_prob == pytest.approx(float(row[token]), abs=1e-5)
        assert found.rank == 1 + int((row > row[token]).sum())
        best = row.topk(3)
        assert [token_id for token_id, _ in found.top] == best.indices.tolist()


def test_logprobs_of_each_sequence_are_its_own_when_paths_are_drawn_afresh(
    decoder: Decoder,
) -> None:
    wanted, greedy = (3, None, 0, 1), SamplingParams(temperature=0.0)
    requests = [
        request(prompt, greedy, top_logprobs=count)
        for prompt, count in zip(PROMPTS, wanted, strict=True)
    ]
    whole = _wholes(_plain(decoder, requests))
    engine = build_engine(decoder, mode=VerificationMode.POINT_MASS)
    ScriptedDraft(engine, oracle_trees(whole, 0, quality=0.7)).attach()
    collector = run(engine, requests)
    for key, (prompt, count) in enumerate(zip(PROMPTS, wanted, strict=True)):
        assert collector.finished(key).stats.num_accepted > 0
        found, tokens = collector.logprobs(key), collector.token_ids(key)
        assert len(found) == (0 if count is None else len(tokens))
        rows = _rescored(decoder, prompt, tokens)
        for each, token, row in zip(found, tokens, rows, strict=False):
            assert each.log_prob == pytest.approx(float(row[token]), abs=1e-5)
            assert [other for other, _ in each.top] == row.topk(count or 0).indices.tolist()


def _rescored(decoder: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    whole = [*prompt, *tokens]
    rows = range(len(prompt) - 1, len(whole) - 1)
    return plain_forward(decoder, whole, rows).logits.log_softmax(-1)


def test_request_without_speculation_is_decoded_plainly(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    ScriptedDraft(engine, random_trees(0)).attach()
    collector = run(engine, [request([1, 2, 3], speculation_disabled=True)])
    stats = collector.finished(0).stats
    assert stats.num_verified_rounds == stats.num_missed_rounds == 0
    assert stats.num_rounds == 24


def test_point_mass_rule_is_greedy_at_temperature_0(decoder: Decoder, overlaps: bool) -> None:
    requests = _requests(SAMPLINGS["greedy"])
    expected = _plain(decoder, requests)
    engine = build_engine(decoder, overlaps=overlaps, mode=VerificationMode.POINT_MASS)
    ScriptedDraft(engine, oracle_trees(_wholes(expected), 0, quality=0.7)).attach()
    assert _outputs(run(engine, requests)) == expected


def test_point_mass_rule_draws_afresh(decoder: Decoder) -> None:
    engine = build_engine(decoder, mode=VerificationMode.POINT_MASS)
    same = request([1, 2, 3], SamplingParams(seed=1))
    outputs = run(engine, [same, same])
    assert outputs.token_ids(0) != outputs.token_ids(1)


def test_cancel_frees_pages(decoder: Decoder) -> None:
    engine = build_engine(decoder, prefix_cache=False)
    collector = Collector()
    engine.submit(request([1, 2, 3], stop=StopParams(100)), collector, 0)
    engine.step()
    assert engine.gauges_now().num_held_pages > 0
    engine.cancel(collector, 0)
    settle(engine)
    assert engine.gauges_now().num_held_pages == 0
    assert not any(isinstance(event, Finished) for event in collector.events[0])


def test_cancel_of_an_unknown_request_is_ignored(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    engine.cancel(Collector(), 5)
    assert not engine.step()


def test_started_comes_first_and_names_cached_tokens(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    run(engine, [request(PROMPTS[3])])
    collector = run(engine, [request(PROMPTS[3])])
    first = collector.events[0][0]
    assert isinstance(first, Started)
    assert first.num_cached_tokens == 8


def test_started_is_told_before_a_cpu_computes_the_prompt(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, told = Collector(), list[bool]()
    forward = Decoder.forward

    def watched(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        told.append(isinstance(collector.events.get(0, [None])[0], Started))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Decoder, "forward", watched)
    engine = build_engine(decoder)
    engine.submit(request(PROMPTS[0]), collector, 0)
    engine.step()
    assert told == [True]


def test_draft_that_does_not_keep_up_is_detached(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    draft = ScriptedDraft(engine, random_trees(0))
    draft.send = lambda message: False  # type: ignore[method-assign]
    draft.attach()
    collector = run(engine, [request([1, 2, 3])])
    assert draft.is_closed
    assert len(collector.token_ids(0)) == 24


def _crowd(engine: Engine, num_requests: int) -> Collector:
    return run(engine, [request([i % VOCAB_SIZE, 1]) for i in range(num_requests)])


def test_full_queue_fails_that_request_alone(decoder: Decoder) -> None:
    collector = _crowd(build_engine(decoder), num_requests=70)
    assert collector.failure(69).error.reason == "QUEUE_FULL"
    assert collector.finished(0).num_output_tokens == 24


def test_a_miss_delays_no_other_sequence(decoder: Decoder) -> None:
    """Of two sequences one never gets a tree; its draft is waited for, the other goes on."""
    steps: list[int] = []
    engine = build_engine(decoder, on_step=lambda report: steps.append(report.num_rounds))
    requests = [request(prompt, stop=StopParams(30)) for prompt in PROMPTS[:2]]
    plain = run(build_engine(decoder), requests)
    whole = [*PROMPTS[0], *plain.token_ids(0)]

    def tree(tokens: list[int]) -> TokenTree:
        return TokenTree.chain(whole[len(tokens) : len(tokens) + 3])

    draft = ScriptedDraft(engine, tree, wait_s=30.0)
    draft.disturb = lambda batch: [each for each in batch if each.sequence_id == 1]
    draft.attach()
    answers = run(engine, requests)
    assert [answers.token_ids(i) for i in range(2)] == [plain.token_ids(i) for i in range(2)]
    # The first ends in the rounds its trees need: the prompt's token, then 4 a round.
    assert len(answers.events[0]) <= 2 + 1 + 8
    assert 1 in steps, "the two never stepped apart"
