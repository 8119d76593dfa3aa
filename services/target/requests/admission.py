"""The way into the engine, the same for every service that takes requests; and their records."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from services.target.engine import Engine
from services.target.grammars.compiler import GrammarCompiler
from services.target.requests.event_stream import EventStream
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


class Admission:
    """What requests need on the event loop before they are queued, of all services together.

    Attributes:
        num_open: requests that have not ended; a drain waits for them.
    """

    def __init__(
        self,
        engine: Engine,
        grammars: GrammarCompiler,
        lifecycle: Lifecycle,
        telemetry: RequestTelemetry,
    ) -> None:
        self.engine, self.grammars, self.lifecycle = engine, grammars, lifecycle
        self.telemetry = telemetry
        self.num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def count(self, num_more: int) -> None:
        """Counts a request that was opened, or one that has ended: -1."""
        self.num_open += num_more
        if self.num_open:
            self._is_idle.clear()
        else:
            self._is_idle.set()

    async def wait_idle(self, timeout_s: float) -> int:
        """Waits until none is open, at most `timeout_s`; returns how many are left."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        return self.num_open


class OpenRequests:
    """The requests of one RPC by their keys, each from its arrival to its end. On the event loop.

    Attributes:
        stream: of the events of all of them.
    """

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.stream = EventStream(asyncio.get_running_loop())
        self._records: dict[int, RequestRecord] = {}

    def begin(
        self, key: int, request_id: str, num_prompt: int, parent: str | None
    ) -> RequestRecord:
        """Opens a request; what fails from here on is counted. Arguments see `RequestRecord`."""
        record = RequestRecord(self.admission.telemetry, request_id, num_prompt, parent)
        self._records[key] = record
        self.admission.count(1)
        return record

    def take(self, key: int, event: Event) -> bool:
        """Records an event; False when it is about a request that was cancelled or timed out."""
        record = self._records.get(key)
        if record is None:
            return False
        record.observe(event)
        if isinstance(event, Finished | Failed):
            self._close(key)
        return True

    def cancel(self, key: int) -> None:
        """Ends a request that nobody waits for any more. Unknown keys are ignored."""
        if key in self._records:
            self._close(key)
        self._stop(key)

    def end(self, key: int, event: Event) -> None:
        """Ends a request wherever it is, queued, computing or unread; `event` is its last."""
        self._stop(key)
        self.stream.put(key, event)

    def cancel_all(self) -> None:
        """Cancels what still runs."""
        for key in tuple(self._records):
            self.cancel(key)

    def _stop(self, key: int) -> None:
        self.admission.engine.cancel(self.stream, key)

    def _close(self, key: int) -> None:
        self._records.pop(key).end()
        self.admission.count(-1)
