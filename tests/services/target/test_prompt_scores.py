"""Prompt tokens get the log probabilities of a plain forward, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from services.target.requests.request import GenerationRequest
from services.target.step_report import StepReport
from shared.errors import InvalidArgument
from shared.generation import PromptScoring
from shared.models.decoder import Decoder
from shared.tokens import SamplingParams, StopParams
from tests.helpers.engines import (
    Collector,
    ScriptedDraft,
    build_engine,
    random_trees,
    request,
    run,
    tiny_decoder,
)
from tests.helpers.plain_forward import plain_forward

PROMPT = [1, 2, 3, 4, 5, 9, 8, 7, 3, 3, 11, 2, 20, 6, 5, 4, 3, 2, 1, 22]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> torch.Tensor:
    return plain_forward(decoder, PROMPT, range(len(PROMPT))).logits.log_softmax(-1)


def _check(collector: Collector, key: int, start: int, expected: torch.Tensor) -> None:
    found = collector.prompt_scores(key)
    assert list(found) == list(range(max(start, 1), len(PROMPT)))
    for position, each in found.items():
        row = expected[position - 1]
        assert each.log_prob == pytest.approx(float(row[PROMPT[position]]), abs=1e-5)
        assert each.rank == 1 + int((row > row[PROMPT[position]]).sum())
        assert [token_id for token_id, _ in each.top] == row.topk(2).indices.tolist()


def _asked(start: int = 0) -> GenerationRequest:
    return request(
        PROMPT, SamplingParams(seed=1), StopParams(6), prompt_scoring=PromptScoring(start, 2)
    )


@pytest.mark.parametrize("max_step_rows", [1, 3, 7, 64])
@pytest.mark.parametrize("start", [0, 1, 6, len(PROMPT) - 1])
def test_scores_do_not_depend_on_chunks(
    decoder: Decoder, expected: torch.Tensor, max_step_rows: int, start: int
) -> None:
    engine = build_engine(decoder, max_step_rows=max_step_rows)
    collector = run(engine, [_asked(start)])
    _check(collector, 0, start, expected)


def test_scores_do_not_depend_on_the_prefix_cache(decoder: Decoder, expected: torch.Tensor) -> None:
    engine = build_engine(decoder)
    plain = request(PROMPT, SamplingParams(seed=1), StopParams(6))
    outputs = [run(engine, [plain]).token_ids(0)]
    for start in (0, 9, 13):
        collector = run(engine, [_asked(start)])
        _check(collector, 0, start, expected)
        # Whole pages before the first scoring row are used.
        assert collector.finished(0).num_cached_tokens == max(start - 1, 0) // 4 * 4
        outputs.append(collector.token_ids(0))
    assert all(output == outputs[0] for output in outputs)


def test_scores_come_once_when_the_sequence_is_preempted(
    decoder: Decoder, expected: torch.Tensor
) -> None:
    reports: list[StepReport] = []
    engine = build_engine(decoder, num_pages=14, max_step_rows=5, on_step=reports.append)
    ScriptedDraft(engine, random_trees(0)).attach()
    crowd = [request([i, 2, 3], SamplingParams(seed=i), StopParams(30)) for i in range(3)]
    collector = run(engine, [*crowd, _asked(0), _asked(5)])
    assert sum(report.num_preempted for report in reports) > 0
    _check(collector, 3, 0, expected)
    _check(collector, 4, 5, expected)


def test_other_sequences_of_the_step_are_undisturbed(decoder: Decoder) -> None:
    others = [request([i, 5], SamplingParams(seed=i), top_logprobs=2) for i in range(4)]
    alone = run(build_engine(decoder), others)
    engine = build_engine(decoder, max_step_rows=9)
    together = run(engine, [_asked(0), *others, _asked(3)])
    for key in range(4):
        assert together.token_ids(key + 1) == alone.token_ids(key)
        found, right = together.logprobs(key + 1), alone.logprobs(key)
        assert [each.rank for each in found] == [each.rank for each in right]


def test_nobody_else_gets_scores(decoder: Decoder) -> None:
    collector = run(build_engine(decoder), [request(PROMPT)])
    assert collector.prompt_scores(0) == {}


def test_one_token_has_nothing_to_score(decoder: Decoder) -> None:
    asked = request([3], stop=StopParams(2), prompt_scoring=PromptScoring(0, 0))
    assert run(build_engine(decoder), [asked]).prompt_scores(0) == {}


@pytest.mark.parametrize(
    ("scoring", "field"),
    [
        (PromptScoring(len(PROMPT), 0), "prompt_logprob_start"),
        (PromptScoring(-1, 0), "prompt_logprob_start"),
        (PromptScoring(0, 21), "prompt_logprobs"),
    ],
)
def test_scoring_out_of_range_is_refused(
    decoder: Decoder, scoring: PromptScoring, field: str
) -> None:
    engine = build_engine(decoder)
    with pytest.raises(InvalidArgument) as refusal:
        engine.submit(request(PROMPT, prompt_scoring=scoring), Collector(), 0)
    assert refusal.value.violations[0].field == field


def test_urgent_request_overtakes(decoder: Decoder) -> None:
    engine = build_engine(decoder, max_running=1)
    order: list[int] = []

    def note(step: int) -> None:
        ended: Sequence[int] = [
            key for key, events in collector.events.items() if len(events) > 1 and key not in order
        ]
        order.extend(ended)

    collector = Collector()
    for key, priority in enumerate((0, 5, -5, 0)):
        engine.submit(request([key], stop=StopParams(3), priority=priority), collector, key)
    for step in range(40):
        engine.step()
        note(step)
    assert order == [2, 0, 3, 1]
