"""The way into the engine, the same for every service that takes requests; and their records."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field

from services.target.engine import Engine
from services.target.grammars.compiler import GrammarCompiler
from services.target.requests.request import Event, Finished
from services.target.step_report import Clock
from shared.generation import Delta, Failed, Started
from shared.rpc.lifecycle import Lifecycle
from shared.telemetry.tracing import NO_TRACER, Tracer, current_request_id
from shared.telemetry.vllm_metrics import VllmMetrics

# Metrics, one log line and one span for each request.

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestTelemetry:
    """What the records of a target's requests share. On the event loop."""

    model_id: str
    metrics: VllmMetrics
    clock: Clock
    tracer: Tracer = NO_TRACER


class RequestRecord:
    """One request from its arrival to its end.

    Args:
        parent: its `traceparent`, if the caller traces.

    Attributes:
        traceparent: for whom the target calls on the request's behalf.
    """

    def __init__(
        self, telemetry: RequestTelemetry, request_id: str, num_prompt: int, parent: str | None
    ) -> None:
        self._telemetry = telemetry
        self.request_id = request_id
        self._num_prompt = num_prompt
        attributes: dict[str, str | int] = {
            "outrider.request_id": request_id,
            "gen_ai.request.model": telemetry.model_id,
            "gen_ai.usage.input_tokens": num_prompt,
        }
        self._span = telemetry.tracer.begin("target.generate", parent, attributes)
        self.traceparent = self._span.traceparent
        self._figures = telemetry.metrics.begin(telemetry.model_id, telemetry.clock())
        self._num_cached = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._reason = "abort"  # until the engine says otherwise
        self._error: str | None = None

    def observe(self, event: Event) -> None:
        """Takes an event of the request, as it goes out."""
        telemetry = self._telemetry
        metrics, now_s = telemetry.metrics, telemetry.clock()
        if isinstance(event, Delta):
            if self._figures.first_s is None:
                self._span.event("first_token")
            num_drafted, num_accepted = event.num_drafted, event.num_accepted
            num_tokens = len(event.token_ids)
            metrics.tokens(self._figures, num_tokens, now_s, num_drafted, num_accepted)
            self._num_drafted += num_drafted
            self._num_accepted += num_accepted
        elif isinstance(event, Started):
            self._span.event("started")
            self._num_cached = event.num_cached_tokens
            metrics.start(self._figures, event.num_cached_tokens, now_s)
        elif isinstance(event, Finished):
            self._reason = event.reason.value
        elif isinstance(event, Failed):
            self.fail(event)

    def fail(self, event: Failed) -> None:
        """The request is refused or broke."""
        self._reason, self._error = "error", event.error.reason

    def end(self) -> None:
        """Nothing more comes; called once."""
        figures = self._figures
        self._telemetry.metrics.end(figures, self._num_prompt, self._reason)
        facts: dict[str, str | int | float] = {
            "outcome": self._error or self._reason,
            "num_prompt": self._num_prompt,
            "num_cached": self._num_cached,
            "num_output": figures.num_tokens,
            "num_drafted": self._num_drafted,
            "num_accepted": self._num_accepted,
        }
        # The requests of a session share its task, and so its context.
        token = current_request_id.set(self.request_id)
        logger.info("request ended", extra=facts)
        current_request_id.reset(token)
        attributes = {f"outrider.{name}": value for name, value in facts.items()}
        attributes["gen_ai.usage.output_tokens"] = figures.num_tokens
        self._span.end(attributes, self._error)


class OpenRequests:
    """A count on the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def add(self) -> None:
        """A request was opened."""
        self.count += 1
        self._is_idle.clear()

    def remove(self) -> None:
        """A request finished, failed or was cancelled."""
        self.count -= 1
        if self.count == 0:
            self._is_idle.set()

    async def wait_idle(self, timeout_s: float) -> int:
        """Waits until none is open, at most `timeout_s`; returns how many are left."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        return self.count


@dataclass(frozen=True, slots=True)
class Admission:
    """The checks that a request passes on the event loop before it is queued.

    Attributes:
        open_requests: of all services together; a drain waits for them.
    """

    engine: Engine
    grammars: GrammarCompiler
    lifecycle: Lifecycle
    telemetry: RequestTelemetry
    open_requests: OpenRequests = field(default_factory=OpenRequests)
