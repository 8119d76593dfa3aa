"""Spans of requests across processes; a no-op unless an OTLP endpoint is set.

A process begins a span for each request it serves and passes the span's `traceparent` on, so that
the next process's span is its child. Source: W3C, "Trace Context".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shared.errors import SettingsError

Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    """Something that takes time."""

    @property
    def traceparent(self) -> str | None:
        """The parent id for child spans; None without tracing."""

    def event(self, name: str) -> None:
        """Notes that something happened now."""

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        """Ends the span, once.

        Args:
            error: why it failed; None when it did not.
        """


class Tracer(Protocol):
    """Begins spans."""

    def begin(self, name: str, parent: str | None, attributes: Attributes) -> Span:
        """Begins a span now.

        Args:
            parent: `traceparent` of the request as it came; None begins a trace.
        """

    def close(self) -> None:
        """Sends what is not sent yet; waits a few seconds at most."""


@dataclass(frozen=True, slots=True)
class _PassedOn:
    """No span of ours; outgoing calls continue the caller's trace."""

    traceparent: str | None

    def event(self, name: str) -> None:
        pass

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        pass


@dataclass(frozen=True, slots=True)
class NoTracer:
    """Costs nothing."""

    def begin(self, name: str, parent: str | None, attributes: Attributes) -> Span:
        return _PassedOn(parent)

    def close(self) -> None:
        pass


NO_TRACER = NoTracer()


def tracer_for(service: str, endpoint: str | None, sample_ratio: float) -> Tracer:
    """Returns the tracer of a process.

    Args:
        endpoint: OTLP over gRPC, `http://host:4317` or `https://…`; None traces nothing.
        sample_ratio: of the traces that begin here, in [0, 1]; others go by their parent.

    Raises:
        SettingsError: the endpoint is no URL, or OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NO_TRACER
    # An optional dependency: who does not trace does not install it, nor wait for its import.
    try:
        from shared.telemetry.otlp import otlp_tracer
    except ModuleNotFoundError as error:
        message = f"--otlp-endpoint needs {error.name}: pip install 'outrider[tracing]'"
        raise SettingsError((message,)) from error
    return otlp_tracer(service, endpoint, sample_ratio)
