"""Context of the request being served, and its spans across processes, which are no-ops without an
OTLP endpoint.

A process begins a span for each request that it serves, and passes the span's `traceparent` to the
next process, whose span is its child. Source: W3C, "Trace Context"."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from shared.errors import SettingsError

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
NO_REQUEST = "-"
MAX_REQUEST_ID_LENGTH = 128

current_request_id: ContextVar[str] = ContextVar("request_id", default=NO_REQUEST)
"""Id of the request; the server interceptor sets it for the time of a call."""

current_traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""W3C trace context of the call, as received."""

Attributes = Mapping[str, str | int | float | bool]


def new_request_id() -> str:
    return uuid.uuid4().hex


def accepted_request_id(proposed: str | None) -> str:
    """Returns the caller's id, or a fresh one if that is absent or unfit for a log line."""
    if proposed and len(proposed) <= MAX_REQUEST_ID_LENGTH and proposed.isprintable():
        return proposed
    return new_request_id()


class Span(Protocol):
    """An operation with a duration."""

    @property
    def traceparent(self) -> str | None:
        """The trace context for child spans; None without tracing."""

    def event(self, name: str) -> None:
        """Adds an event at the current time."""

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        """Ends the span, once.

        Args:
            error: why the operation failed; None if it succeeded.
        """


class Tracer(Protocol):
    """Begins spans."""

    def begin(self, name: str, parent: str | None, attributes: Attributes) -> Span:
        """Begins a span now.

        Args:
            parent: `traceparent` of the request, as received; None begins a trace.
        """

    def close(self) -> None:
        """Sends the remaining spans; waits a few seconds at most."""


@dataclass(frozen=True, slots=True)
class _NoSpan:
    """Records nothing; outgoing calls continue the caller's trace."""

    traceparent: str | None

    def event(self, name: str) -> None:
        pass

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        pass


@dataclass(frozen=True, slots=True)
class NoTracer:
    """Records nothing."""

    def begin(self, name: str, parent: str | None, attributes: Attributes) -> Span:
        return _NoSpan(parent)

    def close(self) -> None:
        pass


NO_TRACER = NoTracer()


def tracer_for(service: str, endpoint: str | None, sample_ratio: float) -> Tracer:
    """Returns the tracer of a process.

    Args:
        endpoint: OTLP over gRPC, `http://host:4317` or `https://…`; None traces nothing.
        sample_ratio: share of the traces that begin here, in [0, 1]; others follow their parent.

    Raises:
        SettingsError: the endpoint is no URL, or OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NO_TRACER
    # An optional dependency: without tracing it is neither needed nor imported.
    try:
        from shared.telemetry.otlp import otlp_tracer
    except ModuleNotFoundError as error:
        message = f"--otlp-endpoint needs {error.name}: pip install 'outrider[tracing]'"
        raise SettingsError((message,)) from error
    return otlp_tracer(service, endpoint, sample_ratio)
