"""Sends spans to an OpenTelemetry collector. Needs `pip install 'outrider[tracing]'`."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.errors import SettingsError
from shared.telemetry.tracing import TRACEPARENT_KEY, Attributes

_EXPORT_TIMEOUT_S = 5.0


class _OtlpSpan:
    """A `Span` made of the SDK's span."""

    def __init__(self, span: SdkSpan) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        flags = int(context.trace_flags)
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class OtlpTracer:
    """A `Tracer` made of the SDK's tracer, which exports spans in batches on its own thread.

    Args:
        processor: receives the spans that have ended.
    """

    def __init__(self, service: str, sample_ratio: float, processor: SpanProcessor) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": f"outrider-{service}"}),
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        )
        self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer("outrider")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str | None, attributes: Attributes) -> _OtlpSpan:
        context = Context()
        if parent is not None:  # a malformed parent is ignored
            context = self._propagator.extract({TRACEPARENT_KEY: parent}, context)
        span = self._tracer.start_span(
            name, context, kind=SpanKind.SERVER, attributes=dict(attributes)
        )
        return _OtlpSpan(span)  # type: ignore[arg-type]

    def close(self) -> None:
        self._provider.force_flush(round(_EXPORT_TIMEOUT_S * 1e3))
        self._provider.shutdown()


def otlp_tracer(service: str, endpoint: str, sample_ratio: float) -> OtlpTracer:
    """Returns a tracer that exports to `endpoint`.

    Raises:
        SettingsError: the endpoint is no URL.
    """
    if not endpoint.startswith(("http://", "https://")):
        message = f"--otlp-endpoint is {endpoint!r}; it must be http://host:port or https://…"
        raise SettingsError((message,))
    exporter = OTLPSpanExporter(
        endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_TIMEOUT_S
    )
    return OtlpTracer(service, sample_ratio, BatchSpanProcessor(exporter))
