"""What a target tells of each request, over real servers: metrics, a log line, deadlines."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio
from prometheus_client import CollectorRegistry, generate_latest

from services.target.engine_factory import build_engine
from services.target.metrics import engine_figures
from services.target.process import TargetProcess
from services.target.settings import TargetSettings
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from shared.telemetry.vllm_metrics import VllmMetrics
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.kept_spans import PARENT, KeptSpans


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "llama", TinyShape(vocab_size=24), seed=3)
    return folder


class Served:
    """A target with its figures in view.

    Attributes:
        may_go_on: the engine's thread waits for it after each step.
    """

    def __init__(self, settings: TargetSettings) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.engine = engine = build_engine(settings, lambda report: self._pause())
        self.model_id = settings.model_id
        self.spans = KeptSpans("target")
        self.metrics = VllmMetrics(lambda: engine_figures(engine, settings, 0))
        self.process = TargetProcess(
            engine, settings, "ab" * 32, metrics=self.metrics, tracer=self.spans.tracer
        )

    def _pause(self) -> None:
        self.may_go_on.wait()

    async def scrape(self) -> str:
        registry = CollectorRegistry()
        registry.register(self.metrics)
        return (await asyncio.to_thread(generate_latest, registry)).decode()

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[pb_grpc.TargetServiceStub]:
        async with open_channel(f"127.0.0.1:{self.process.port}") as channel:
            yield pb_grpc.TargetServiceStub(channel)


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    settings = TargetSettings(
        model_path=folder, port=0, max_total_tokens=512, context_length=500, device="cpu"
    )
    served = Served(settings)
    await served.process.start()
    yield served
    served.may_go_on.set()
    await served.process.stop(0.0)


def _request(prompt: list[int], max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=prompt,
        sampling_params=sampling_pb2.SamplingParams(temperature=0.0),
        stop_params=sampling_pb2.StopParams(max_output_token_count=max_tokens, ignore_eos=True),
    )


async def test_a_call_is_counted_logged_and_traced_under_its_id(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.target.requests.admission")
    async with served.stub() as stub:
        metadata = (("x-request-id", "abc"), ("traceparent", PARENT))
        async for _ in stub.Generate(_request([1, 2, 3], 5), metadata=metadata):
            pass
    text = await served.scrape()
    labels = f'{{engine="0",model_name="{served.model_id}"'
    assert f"vllm:generation_tokens_total{labels}}} 5.0" in text
    assert f"vllm:prompt_tokens_total{labels}}} 3.0" in text
    assert 'finished_reason="length"' in text
    assert f"vllm:kv_cache_usage_perc{labels}}} 0.0" in text
    [record] = caplog.records
    assert (record.outcome, record.num_output) == ("length", 5)  # type: ignore[attr-defined]
    [span] = served.spans.ended
    assert span.parent_id == PARENT.split("-")[2]
    assert span.attributes["outrider.request_id"] == "abc"
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert span.events == ["started", "first_token"]


async def test_a_refused_call_is_an_error_in_all_three(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.target.requests.admission")
    async with served.stub() as stub:
        with pytest.raises(aio.AioRpcError):
            async for _ in stub.Generate(_request([], 5)):
                pass
    assert 'finished_reason="error"' in await served.scrape()
    assert caplog.records[0].outcome == "PROMPT_EMPTY"  # type: ignore[attr-defined]
    assert served.spans.ended[0].error == "PROMPT_EMPTY"


async def test_a_request_out_of_time_fails_alone_and_frees_its_pages(served: Served) -> None:
    served.may_go_on.clear()
    async with served.stub() as stub:
        call = stub.Session()  # type: ignore[call-arg]
        for key, max_tokens in ((1, 480), (2, 8)):
            submit = pb.Submit(request_id=key, request=_request([key], max_tokens))
            submit.trace_request_id = f"request-{key}"
            if key == 1:
                submit.timeout_duration.FromMilliseconds(30)
            await call.write(pb.SessionRequest(submit=submit))
        await call.done_writing()
        events: list[pb.SessionEvent] = []
        async for message in call:
            events += message.events
            if any(event.HasField("failure") for event in message.events):
                served.may_go_on.set()
    last = {event.request_id: event for event in events}
    assert last[1].failure.reason == "DEADLINE_EXCEEDED"
    assert "the 0.03 s it was given" in last[1].failure.message
    assert last[2].response.HasField("finished")
    assert "vllm:kv_cache_usage_perc" in await served.scrape()
    gauges = await asyncio.wrap_future(served.engine.gauges())
    assert (gauges.num_running, gauges.num_held_pages) == (0, 0)
    assert {span.attributes["outrider.request_id"] for span in served.spans.ended} == {
        "request-1",
        "request-2",
    }


async def test_a_call_has_the_deadline_of_its_rpc(served: Served) -> None:
    served.may_go_on.clear()
    async with served.stub() as stub:
        for timeout_s in (0.03, 0.3, 3.0, 30.0):  # in which a busy machine may not even begin
            with pytest.raises(aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                async for _ in stub.Generate(_request([1], 480), timeout=timeout_s):
                    pass
            if served.spans.ended:
                break
        served.may_go_on.set()
        async with asyncio.timeout(60):
            while (await asyncio.wrap_future(served.engine.gauges())).num_held_pages:
                await asyncio.sleep(0)
    assert served.spans.ended[0].attributes["outrider.outcome"] == "abort"
