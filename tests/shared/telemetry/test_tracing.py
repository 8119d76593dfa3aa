"""Spans: who is whose child, what is kept, and that nothing happens when nobody traces."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

from shared.errors import SettingsError
from shared.telemetry.tracing import NO_TRACER, tracer_for
from tests.helpers.kept_spans import PARENT, KeptSpans

ROOT = Path(__file__).parents[3]
UNSAMPLED = PARENT[:-2] + "00"


def test_a_span_is_the_child_of_who_called() -> None:
    spans = KeptSpans("target")
    outer = spans.tracer.begin("gateway.chat", PARENT, {"n": 1})
    inner = spans.tracer.begin("target.generate", outer.traceparent, {})
    inner.event("first_token")
    inner.end({"num_output": 3})
    outer.end({}, error="TARGET_LOST")
    child, parent = spans.ended
    assert (parent.trace_id, parent.parent_id) == tuple(PARENT.split("-")[1:3])
    assert (child.trace_id, child.parent_id) == (parent.trace_id, parent.span_id)
    assert child.attributes == {"num_output": 3}
    assert child.events == ["first_token"]
    assert (child.error, parent.error) == (None, "TARGET_LOST")
    spans.tracer.close()


def test_a_trace_without_a_parent_begins_here() -> None:
    spans = KeptSpans("target")
    for parent in (None, "nonsense"):
        span = spans.tracer.begin("a", parent, {})
        assert span.traceparent.startswith("00-")
        span.end({})
    assert [span.parent_id for span in spans.ended] == [None, None]


def test_sampling_goes_by_the_parent_first() -> None:
    spans = KeptSpans("target", sample_ratio=0.0)
    for parent in (None, UNSAMPLED, PARENT):
        span = spans.tracer.begin("a", parent, {})
        is_sampled = int(span.traceparent[-2:], 16) & 1  # the other bits say other things
        assert is_sampled == (parent == PARENT)
        span.end({})
    assert len(spans.ended) == 1


def test_without_an_endpoint_the_callers_trace_goes_on() -> None:
    tracer = tracer_for("gateway", None, 1.0)
    assert tracer is NO_TRACER
    span = tracer.begin("a", PARENT, {})
    span.event("b")
    span.end({})
    assert span.traceparent == PARENT
    assert tracer.begin("a", None, {}).traceparent is None


def test_without_an_endpoint_opentelemetry_is_not_loaded() -> None:
    program = (
        "import sys\nimport gateway.app, services.draft.process\n"
        "from shared.telemetry.tracing import tracer_for\ntracer_for('gateway', None, 1.0)\n"
        "assert not any(name.startswith('opentelemetry.sdk') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://a"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="--otlp-endpoint"):
        tracer_for("gateway", endpoint, 1.0)


def test_without_opentelemetry_an_endpoint_is_refused_by_the_extra_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "shared.telemetry.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"pip install 'outrider\[tracing\]'"):
        tracer_for("gateway", "http://127.0.0.1:4317", 1.0)


class Collector(pb_grpc.TraceServiceServicer):
    """An OpenTelemetry collector's front door."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> Any:
        scopes = [s for resource in request.resource_spans for s in resource.scope_spans]
        self.names += [span.name for scope in scopes for span in scope.spans]
        return pb.ExportTraceServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server, collector = aio.server(), Collector()
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield collector, f"http://127.0.0.1:{port}"
    await server.stop(None)


async def test_spans_reach_the_collector_by_the_time_the_process_ends(
    collector: tuple[Collector, str],
) -> None:
    received, endpoint = collector
    tracer = tracer_for("draft", endpoint, 1.0)
    tracer.begin("draft.sequence", None, {}).end({})
    await asyncio.to_thread(tracer.close)
    assert received.names == ["draft.sequence"]
