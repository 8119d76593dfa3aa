"""Outputs of one request over an engine that is stepped by hand: nothing waits for time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.target.engine import Engine
from services.target.grammars.compiler import GrammarCompiler, GrammarLimits
from services.target.requests.admission import Admission, RequestTelemetry
from services.target.requests.request import GenerationRequest
from services.target.settings import DEMO_MODEL
from services.target.vllm.open_choices import ChoiceOutput, OpenChoices, TextStop
from shared.errors import InvalidArgument
from shared.generation import Delta
from shared.models.decoder import Decoder
from shared.rpc.server import Lifecycle
from shared.telemetry.vllm_metrics import VllmMetrics
from shared.tokens import FinishReason, SamplingParams, StopParams
from tests.helpers.engines import build_engine, request, run, tiny_decoder

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("model"))


class _StopAfter(TextStop):
    """Says that a stop string is complete after so many tokens, whatever they spell."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    @property
    def matched(self) -> str | None:
        return None if self._num_left else "end"

    def take(self, token_ids: Sequence[int]) -> int:
        num_taken = min(self._num_left, len(token_ids))
        self._num_left -= num_taken
        return num_taken


def _opened(engine: Engine) -> OpenChoices:
    telemetry = RequestTelemetry("m", VllmMetrics(), lambda: 0.0)
    limits = GrammarLimits(max_bytes=1, compile_timeout_s=1.0)
    grammars = GrammarCompiler(DEMO_MODEL, vocab_size=1, eos_token_ids=(), limits=limits)
    grammars.close()
    return OpenChoices(Admission(engine, grammars, Lifecycle(()), telemetry))


def _requests(num_choices: int, num_tokens: int = 12) -> list[GenerationRequest]:
    stop = StopParams(num_tokens, ignore_eos=True)
    sampling = SamplingParams(temperature=1.0)
    return [request(PROMPT, replace(sampling, seed=seed), stop) for seed in range(num_choices)]


def _submit(
    opened: OpenChoices,
    requests: Sequence[GenerationRequest],
    stops: Sequence[TextStop | None] | None = None,
) -> None:
    for index in range(len(requests)):
        opened.begin(index, "r", len(PROMPT), None)
    opened.submit(requests, stops or [None] * len(requests))


def _step(engine: Engine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


async def _ended(opened: OpenChoices) -> list[tuple[ChoiceOutput, list[int]]]:
    """Returns the outputs with the tokens of their deltas, when all of them have ended."""
    streamed: dict[int, list[int]] = {choice.index: [] for choice in opened.choices}
    async for choice, delta in opened.outputs():
        if delta is not None:
            streamed[choice.index] += delta.token_ids
    opened.cancel_all()
    return [(choice, streamed[choice.index]) for choice in opened.choices]


async def test_outputs_are_those_of_requests_of_their_own(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    alone = run(build_engine(decoder), _requests(3))
    opened = _opened(engine)
    _submit(opened, _requests(3))
    _step(engine, 40)
    for choice, streamed in await _ended(opened):
        assert choice.token_ids == streamed == alone.token_ids(choice.index)
        assert choice.finished is not None
        assert choice.finished.reason is FinishReason.LENGTH
    _step(engine, 1)
    engine.check_idle()


async def test_abort_keeps_what_is_there_and_frees_the_pages(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    alone = run(build_engine(decoder), _requests(2, 40))
    opened = _opened(engine)
    _submit(opened, _requests(2, 40))
    _step(engine, 6)
    await asyncio.sleep(0)  # what the engine delivered arrives on the loop
    opened.abort()
    _step(engine, 3)
    engine.check_idle()
    for choice, streamed in await _ended(opened):
        assert choice.finished is not None
        assert choice.finished.reason is FinishReason.CANCELLED
        assert 0 < len(streamed) < 40
        assert choice.token_ids == streamed == alone.token_ids(choice.index)[: len(streamed)]


async def test_abort_before_the_submission_runs_nothing(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    opened = _opened(engine)
    opened.abort()
    _submit(opened, _requests(1))
    engine.step()
    [(choice, streamed)] = await _ended(opened)
    assert streamed == []
    assert choice.finished is not None
    assert choice.finished.reason is FinishReason.CANCELLED
    engine.check_idle()


async def test_an_abort_that_comes_after_the_end_changes_nothing(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    opened = _opened(engine)
    _submit(opened, _requests(1))
    _step(engine, 40)
    ended = [(choice.finished, delta) async for choice, delta in opened.outputs()]
    opened.abort()
    opened.cancel_all()
    _step(engine, 1)
    assert ended[-1][0] is not None
    assert ended[-1][0].reason is FinishReason.LENGTH


async def test_a_stop_string_ends_one_output_and_not_its_neighbour(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    alone = run(build_engine(decoder), _requests(2, 40))
    opened = _opened(engine)
    _submit(opened, _requests(2, 40), [_StopAfter(5), None])
    _step(engine, 10)
    iterator = opened.outputs()
    async for choice, _ in iterator:
        if choice.finished is not None:
            break
    first, second = opened.choices
    assert first.finished is not None
    assert (first.finished.reason, first.stop_string) == (FinishReason.STOP, "end")
    assert first.token_ids == alone.token_ids(0)[:5]
    _step(engine, 60)
    async for choice, _ in iterator:
        assert choice is second
    opened.cancel_all()
    assert second.token_ids == alone.token_ids(1)
    engine.check_idle()


def test_a_step_that_brings_more_than_the_stop_string_is_cut() -> None:
    output = ChoiceOutput(0, request(PROMPT), _StopAfter(2))
    delta = output.push(Delta((4, 5, 6), (), num_accepted=2, num_drafted=3))
    assert delta == Delta((4, 5), (), num_accepted=2, num_drafted=3)
    assert output.token_ids == [4, 5]
    output = ChoiceOutput(0, request(PROMPT), _StopAfter(1))
    assert output.push(Delta((4, 5, 6), (), 2, 3)) == Delta((4,), (), 1, 3)


async def test_hanging_up_frees_the_pages(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    opened = _opened(engine)
    _submit(opened, _requests(3, 40))
    _step(engine, 4)
    opened.cancel_all()
    _step(engine, 3)
    engine.check_idle()


async def test_a_request_the_engine_refuses_leaves_nothing_behind(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    opened = _opened(engine)
    good, bad = _requests(2)
    with pytest.raises(InvalidArgument):
        _submit(opened, [good, replace(bad, top_logprobs=99)])
    opened.cancel_all()
    _step(engine, 3)
    engine.check_idle()
