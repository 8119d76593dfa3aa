"""Output under a grammar: in the language, and the same whatever drafts do."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from llguidance import LLParserLimits

from services.target.grammars.matcher import CompiledGrammar
from services.target.requests.request import GenerationRequest
from services.target.step_report import StepReport
from services.target.verifier import VerificationMode
from shared.grammar import GrammarKind
from shared.models.decoder import Decoder
from shared.tokens import EMPTY_TREE, FinishReason, SamplingParams, StopParams, TokenTree
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
    shuffled_drops,
    tiny_decoder,
)
from tests.helpers.grammars import EOS, compiled, regex, spelled, tree_tokens
from tests.helpers.plain_forward import plain_forward

PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11], [3] * 12)
PATTERN = r"\{(a|b|ab|bc|x){3,9}(0|1|01|12){0,6}\}( ?[xy]{1,3})*"
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(seed=7)
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature 1": WARM,
    "truncated": SamplingParams(temperature=0.8, top_k=5, top_p=0.9, seed=1),
    "penalised": SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3, seed=2),
    "biased": SamplingParams(logit_bias={1: 4.0, 4: 100.0}, seed=3),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def grammar() -> CompiledGrammar:
    return regex(PATTERN)


def _requests(
    grammar: CompiledGrammar, sampling: SamplingParams, stop: StopParams | None = None
) -> list[GenerationRequest]:
    """Returns a constrained request for each prompt, and one that is not constrained."""
    constrained = [
        request(prompt, replace(sampling, seed=sampling.seed + i), stop, grammar=grammar)
        for i, prompt in enumerate(PROMPTS)
    ]
    return [*constrained, request(PROMPTS[0], sampling, stop)]


def _outputs(collector: Collector) -> list[list[int]]:
    return [collector.token_ids(key) for key in range(len(PROMPTS) + 1)]


def _plain(decoder: Decoder, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    return _outputs(run(_engine(decoder), requests))


def _engine(decoder: Decoder, **changes: object):  # type: ignore[no-untyped-def]
    return build_engine(decoder, eos_token_ids=frozenset({EOS}), **changes)  # type: ignore[arg-type]


def _wholes(outputs: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=False)]


def _always_wrong(wholes: Sequence[Sequence[int]]) -> Proposal:
    def propose(tokens: list[int]) -> TokenTree:
        known = next((w for w in wholes if list(w[: len(tokens)]) == tokens), [])
        return TokenTree.chain([(t + 1) % VOCAB_SIZE for t in known[len(tokens) :][:3]])

    return propose


def _beyond_the_end(wholes: Sequence[Sequence[int]]) -> Proposal:
    """Right tokens, and after the last one three that must never be committed."""

    def propose(tokens: list[int]) -> TokenTree:
        known = next((w for w in wholes if list(w[: len(tokens)]) == tokens), [])
        return TokenTree.chain([*known[len(tokens) :][:5], EOS, 1, 2])

    return propose


@pytest.mark.parametrize("name", SAMPLINGS)
def test_output_is_that_of_plain_decoding_for_every_draft(
    decoder: Decoder, grammar: CompiledGrammar, name: str
) -> None:
    requests = _requests(grammar, SAMPLINGS[name])
    expected = _plain(decoder, requests)
    wholes = _wholes(expected)
    scripts = {
        "perfect": oracle_trees(wholes, seed=0, quality=1.0),
        "half right": oracle_trees(wholes, seed=1, quality=0.5),
        "always wrong": _always_wrong(wholes),
        "random": random_trees(seed=2, max_nodes=14),
        "beyond the end": _beyond_the_end(wholes),
    }
    for script_name, script in scripts.items():
        engine = _engine(decoder)
        ScriptedDraft(engine, script).attach()
        collector = run(engine, requests)
        assert _outputs(collector) == expected, script_name
        accepted = [collector.finished(key).stats.num_accepted for key in range(len(PROMPTS))]
        if script_name in ("perfect", "beyond the end"):
            assert all(accepted)
        if script_name == "always wrong":
            assert not any(accepted)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_finished_output_is_in_the_language_and_cut_output_begins_a_word(
    decoder: Decoder, grammar: CompiledGrammar, name: str
) -> None:
    requests = _requests(grammar, SAMPLINGS[name], StopParams(40))
    collector = run(_engine(decoder), requests)
    reasons = []
    for key in range(len(PROMPTS)):
        output, reason = collector.token_ids(key), collector.finished(key).reason
        reasons.append(reason)
        if reason is FinishReason.STOP:
            assert re.fullmatch(PATTERN, spelled(output)), spelled(output)
    unconstrained = spelled(collector.token_ids(len(PROMPTS)))
    assert not re.fullmatch(PATTERN, unconstrained), "the model would match by itself"
    assert FinishReason.STOP in reasons


def test_output_ends_with_the_token_that_completes_the_grammar(decoder: Decoder) -> None:
    """No end token follows where nothing else could, even one that was drafted."""
    for text in ("abc", "x{4}", "(ab|0)"):
        asked = request([1, 2, 3], WARM, grammar=regex(text))
        for propose in (random_trees(0), lambda tokens: TokenTree.chain([5, EOS, EOS])):
            engine = _engine(decoder)
            ScriptedDraft(engine, propose).attach()
            collector = run(engine, [asked])
            output = collector.token_ids(0)
            assert re.fullmatch(text, spelled(output))
            assert EOS not in output
            assert collector.finished(0).reason is FinishReason.STOP
            assert collector.finished(0).stop_token_id is None


def test_end_token_comes_only_after_a_match(decoder: Decoder) -> None:
    eager = SamplingParams(logit_bias={EOS: 100.0}, seed=1)
    collector = run(_engine(decoder), [request([1, 2], eager, grammar=regex("(ab)+x*"))])
    assert collector.token_ids(0)[-1] == EOS
    assert spelled(collector.token_ids(0)) == "ab"
    assert collector.finished(0).stop_token_id == EOS


def test_end_token_that_is_ignored_ends_a_grammar_all_the_same(decoder: Decoder) -> None:
    eager = SamplingParams(logit_bias={EOS: 100.0}, seed=1)
    stop = StopParams(24, ignore_eos=True)
    collector = run(_engine(decoder), [request([1], eager, stop, grammar=regex("(ab)+x*"))])
    assert spelled(collector.token_ids(0)) == "ab"
    assert collector.finished(0).reason is FinishReason.STOP


def test_minimum_length_holds_while_the_grammar_has_a_choice(decoder: Decoder) -> None:
    eager = SamplingParams(logit_bias={EOS: 100.0}, seed=1)
    stop = StopParams(24, min_output_tokens=6)
    requests = [
        request([1, 2], eager, stop, grammar=regex("(ab)+x*")),
        request([1, 2], eager, stop, grammar=regex("ab")),
    ]
    collector = run(_engine(decoder), requests)
    assert len(collector.token_ids(0)) >= 6
    assert spelled(collector.token_ids(1)) == "ab"


def test_drops_repeats_and_false_fences_change_nothing(
    decoder: Decoder, grammar: CompiledGrammar
) -> None:
    requests = _requests(grammar, WARM)
    expected = _plain(decoder, requests)
    for seed in range(3):
        engine = _engine(decoder)
        script = oracle_trees(_wholes(expected), seed, quality=0.7)
        ScriptedDraft(engine, script, disturb=shuffled_drops(seed)).attach()
        assert _outputs(run(engine, requests)) == expected


def test_preemption_and_chunked_prefill_change_nothing(
    decoder: Decoder, grammar: CompiledGrammar
) -> None:
    requests = _requests(grammar, WARM)
    expected = _plain(decoder, requests)
    reports: list[StepReport] = []
    engine = _engine(decoder, num_pages=14, max_step_rows=3, on_step=reports.append)
    ScriptedDraft(engine, oracle_trees(_wholes(expected), 5, quality=0.6)).attach()
    assert _outputs(run(engine, requests)) == expected
    assert sum(report.num_preempted for report in reports) > 0


def test_choices_of_one_prompt_share_a_grammar_and_nothing_else(
    decoder: Decoder, grammar: CompiledGrammar
) -> None:
    requests = [request([1, 2, 3], SamplingParams(seed=s), grammar=grammar) for s in range(6)]
    together = run(_engine(decoder), requests)
    outputs = [together.token_ids(key) for key in range(6)]
    assert len({tuple(output) for output in outputs}) > 1
    for asked, output in zip(requests, outputs, strict=True):
        assert run(_engine(decoder), [asked]).token_ids(0) == output


def test_json_of_a_model_that_knows_no_json_parses(decoder: Decoder) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 4},
            "b": {"type": "integer", "minimum": 0, "maximum": 222},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    grammar = compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    for seed in range(8):
        asked = request([seed], SamplingParams(seed=seed), StopParams(150), grammar=grammar)
        collector = run(_engine(decoder), [asked])
        value = json.loads(spelled(collector.token_ids(0)))
        assert isinstance(value["a"], str)
        assert len(value["a"]) <= 4
        assert 0 <= value["b"] <= 222


@pytest.mark.parametrize("mode", VerificationMode)
def test_distribution_is_the_models_own_given_that_the_output_matches_so_far(
    decoder: Decoder, mode: VerificationMode
) -> None:
    """Exact: every output of a small language, its probability by the chain rule over masks."""
    grammar = regex("(a|ab|bc|x)(0|1|12)?")
    prompt = [1, 2, 3]
    distribution = _distribution(decoder, prompt, grammar)
    assert math.isclose(sum(distribution.values()), 1.0, abs_tol=1e-5)
    assert len(distribution) >= 16
    counts: Counter[tuple[int, ...]] = Counter()
    num_outputs, size = 1000, 250
    for start in range(0, num_outputs, size):
        engine = _engine(decoder, mode=mode, max_running=64)
        ScriptedDraft(engine, random_trees(start, max_nodes=10)).attach()
        seeds = range(start, start + size)
        for first in range(0, size, 50):
            asked = [
                request(prompt, SamplingParams(seed=s), grammar=grammar)
                for s in seeds[first : first + 50]
            ]
            collector = run(engine, asked)
            counts.update(tuple(collector.token_ids(key)) for key in range(len(asked)))
    assert set(counts) <= set(distribution)
    assert _chi_square(counts, distribution) < _bound(len(distribution))
    # The control: the same counts do not fit a distribution that is off by three tenths. Its
    # chi-square is about 100 larger, the bound about 30.
    skewed = {
        output: p * (1.3 if i % 2 else 0.7) for i, (output, p) in enumerate(distribution.items())
    }
    assert _chi_square(counts, skewed) > _bound(len(distribution))


def _distribution(
    decoder: Decoder, prompt: list[int], grammar: CompiledGrammar
) -> dict[tuple[int, ...], float]:
    distribution: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        output, probability = waiting.pop()
        matcher = grammar.matcher()
        for token_id in output:
            matcher.advance(token_id)
        if matcher.has_ended:
            distribution[output] = probability
            continue
        [allowed] = tree_tokens(matcher, EMPTY_TREE)
        assert allowed is not None
        ids = sorted(allowed)
        whole = [*prompt, *output]
        [logits] = plain_forward(decoder, whole, [len(whole) - 1]).logits.float()
        weights = logits[ids].softmax(0).tolist()
        waiting += [((*output, i), probability * w) for i, w in zip(ids, weights, strict=True)]
    return distribution


def _chi_square(
    counts: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]
) -> float:
    total, mass = counts.total(), sum(distribution.values())
    return sum(
        (counts[output] - total * p / mass) ** 2 / (total * p / mass)
        for output, p in distribution.items()
    )


def _bound(num_outcomes: int) -> float:
    """Mean plus five standard deviations of chi-square."""
    freedom = num_outcomes - 1
    return freedom + 5 * math.sqrt(2 * freedom)


def test_grammar_that_cannot_be_followed_fails_that_request_alone(decoder: Decoder) -> None:
    limits = LLParserLimits(step_lexer_fuel=20, precompute_large_lexemes=False)
    hard = compiled(GrammarKind.REGEX, "(a|b|ab|abc){1,40}x(a|b|ab|abc){1,40}", limits)
    asked = [request([1, 2], WARM, grammar=hard), request([1, 2], WARM, grammar=regex("x{9}"))]
    collector = run(_engine(decoder), asked)
    assert collector.failure(0).error.reason == "GRAMMAR_TOO_COMPLEX"
    assert spelled(collector.token_ids(1)) == "x" * 9
