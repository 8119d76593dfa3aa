"""A real tracer that keeps its spans in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from shared.telemetry.otlp import OtlpTracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A span that ended; ids are hexadecimal, as in `traceparent`."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    attributes: Mapping[str, Any]
    events: list[str]
    error: str | None


class KeptSpans(SpanExporter):
    """Keeps the spans that the tracer of one process exports."""

    def __init__(self, service: str, sample_ratio: float = 1.0) -> None:
        self.ended: list[KeptSpan] = []
        self.tracer = OtlpTracer(service, sample_ratio, SimpleSpanProcessor(self))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.ended.extend(map(_kept, spans))
        return SpanExportResult.SUCCESS


def _kept(span: ReadableSpan) -> KeptSpan:
    assert span.context is not None
    return KeptSpan(
        name=span.name,
        trace_id=f"{span.context.trace_id:032x}",
        span_id=f"{span.context.span_id:016x}",
        parent_id=None if span.parent is None else f"{span.parent.span_id:016x}",
        attributes=dict(span.attributes or {}),
        events=[event.name for event in span.events],
        error=None if span.status.is_ok else span.status.description,
    )
