"""The requests of one session, over an engine that is stepped by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.target.grammars.compiler import GrammarCompiler, GrammarLimits
from services.target.requests.admission import Admission, RequestTelemetry
from services.target.requests.generate_service import OpenSession
from services.target.settings import DEMO_MODEL
from shared.generation import Failed
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.types.v1 import grammar_pb2
from shared.rpc.server import Lifecycle
from shared.telemetry.vllm_metrics import VllmMetrics
from tests.helpers.engines import build_engine, settle, tiny_decoder


async def test_an_unexpected_failure_ends_its_request_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build_engine(tiny_decoder(tmp_path))
    limits = GrammarLimits(max_bytes=100, compile_timeout_s=1.0)
    grammars = GrammarCompiler(DEMO_MODEL, vocab_size=1, eos_token_ids=(), limits=limits)
    grammars.close()  # its threads take no work any more
    telemetry = RequestTelemetry("m", VllmMetrics(), lambda: 0.0)
    lifecycle = Lifecycle(())
    session = OpenSession(Admission(engine, grammars, lifecycle, telemetry))
    half_closed = asyncio.Event()

    async def messages() -> AsyncIterator[pb.SessionRequest]:
        for key, grammar in ((1, grammar_pb2.Grammar(regex="a+")), (2, None)):
            request = pb.GenerateRequest(prompt_token_ids=[1, 2], grammar=grammar)
            yield pb.SessionRequest(submit=pb.Submit(request_id=key, request=request))
        await half_closed.wait()

    session.read(messages())
    [(key, event)] = await session.next_batch() or []
    assert key == 1
    assert isinstance(event, Failed)
    assert event.error.reason == "ENGINE_FAILED"
    assert "before it was queued" in caplog.text
    settle(engine)
    assert {key for key, _ in await session.next_batch() or []} == {2}
    half_closed.set()
    session.close()
    assert lifecycle.num_open == 0
