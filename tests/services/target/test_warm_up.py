"""The first generation computes what the first client would wait for, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.target.engine import Engine
from services.target.process import warm_up, warm_up_tokens
from services.target.requests.request import EventSink, GenerationRequest
from services.target.step_report import StepReport
from shared.errors import EngineFailed
from shared.models.decoder import Decoder
from tests.helpers.engines import build_engine, tiny_decoder
from tests.helpers.one_draft import make_attachment

CONTEXT = 100


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture
def reports() -> list[StepReport]:
    return []


@pytest.fixture
def engine(decoder: Decoder, reports: list[StepReport]) -> Iterator[Engine]:
    engine = build_engine(decoder, max_context_tokens=CONTEXT, on_step=reports.append)
    engine.start()
    engine.gauges().result(timeout=60)  # its thread has begun
    yield engine
    engine.stop()


async def test_a_whole_chunk_is_computed_and_forgotten(
    engine: Engine, reports: list[StepReport]
) -> None:
    await warm_up(engine, 60)
    gauges = engine.gauges().result(timeout=60)
    assert (gauges.num_running, gauges.num_cached_pages) == (0, 0)
    assert sum(report.num_rows for report in reports) >= 61
    assert sum(report.num_committed for report in reports) == 2


async def test_what_a_draft_took_in_the_warm_up_is_forgotten(engine: Engine) -> None:
    drafts = [make_attachment(name) for name in ("a", "b")]
    for draft in drafts:
        engine.attach(draft)
    engine.gauges().result(timeout=60)
    before = drafts[0].policy
    assert drafts[1].policy is before
    before.is_pinned = True
    for _ in range(20):
        before.observe_round(before.base, 1, 5.0, has_tree=True)
    await warm_up(engine, 60)
    assert drafts[0].policy is drafts[1].policy is not before
    assert drafts[0].policy.is_pinned
    assert not drafts[0].policy.times.measured()


def test_on_a_gpu_a_prompt_is_as_long_as_a_step_can_take(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warm_up_tokens(engine, 64) == 1
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    assert warm_up_tokens(engine, 64) == 64
    assert warm_up_tokens(engine, 2048) == CONTEXT - 2


async def test_an_engine_that_cannot_serve_says_so(engine: Engine) -> None:
    def run_out() -> None:
        raise torch.OutOfMemoryError("Tried to allocate 1.00 KiB.")

    engine._inbox.post(run_out)
    assert engine._thread is not None
    engine._thread.join()
    with pytest.raises(EngineFailed):
        await warm_up(engine, 1)


async def test_on_a_gpu_prompts_come_in_groups_of_any_size(
    engine: Engine, reports: list[StepReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No longer than the longest, and no more than may wait."""
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    submitted: list[int] = []
    submit = Engine.submit

    def counted(self: Engine, asked: GenerationRequest, sink: EventSink, key: int) -> None:
        submitted.append(key)
        assert len(asked.prompt_token_ids) <= 40
        submit(self, asked, sink, key)

    monkeypatch.setattr(Engine, "submit", counted)
    await warm_up(engine, 40, 4)
    gauges = engine.gauges().result(timeout=60)
    assert (gauges.num_running, gauges.num_cached_pages) == (0, 0)
    assert max(submitted) == 3
