"""Admission of requests to the engine, shared by all services that take requests, the events that
come back, and the metrics, log line and span of each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from services.target.engine import Engine
from services.target.grammars.compiler import GrammarCompiler
from services.target.requests.request import Event, Finished
from services.target.step_report import Clock
from shared.errors import QueueFull
from shared.generation import Delta, Failed, Started
from shared.rpc.server import Lifecycle
from shared.telemetry.tracing import NO_TRACER, Tracer, current_request_id
from shared.telemetry.vllm_metrics import VllmMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestTelemetry:
    """What the records of all requests of a target share. Used on the event loop."""

    model_id: str
    metrics: VllmMetrics
    clock: Clock
    tracer: Tracer = NO_TRACER


class RequestRecord:
    """Metrics, log line and span of one request, from its arrival to its end.

    Args:
        num_prompt: prompt tokens.
        parent: `traceparent` of the caller, if it traces.

    Attributes:
        traceparent: `traceparent` for calls of the target on the request's behalf.
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
        """Records an event of the request when it is sent."""
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
        """Records that the request was refused or failed."""
        self._reason, self._error = "error", event.error.reason

    def end(self) -> None:
        """Ends the record, behind the last event; called once."""
        figures = self._figures
        self._telemetry.metrics.end(figures, self._num_prompt, self._reason)
        fields: dict[str, str | int | float] = {
            "outcome": self._error or self._reason,
            "num_prompt": self._num_prompt,
            "num_cached": self._num_cached,
            "num_output": figures.num_tokens,
            "num_drafted": self._num_drafted,
            "num_accepted": self._num_accepted,
        }
        # The requests of a session share a task, so the context does not have this request's id.
        token = current_request_id.set(self.request_id)
        logger.info("request ended", extra=fields)
        current_request_id.reset(token)
        attributes = {f"outrider.{name}": value for name, value in fields.items()}
        attributes["gen_ai.usage.output_tokens"] = figures.num_tokens
        self._span.end(attributes, self._error)


@dataclass(frozen=True, slots=True)
class Admission:
    """What requests need on the event loop before they are queued; shared by all services."""

    engine: Engine
    grammars: GrammarCompiler
    lifecycle: Lifecycle
    telemetry: RequestTelemetry


KeyedEvent = tuple[int, Event]
MAX_UNREAD_EVENTS = 65_536


class EventQueue:
    """An `EventSink` that an RPC reads in batches.

    A slow reader gets the events of several steps in one batch. While `max_unread_events` or more
    are unread, new requests are refused, see `check_room`. Those that are open still add events.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_unread_events: int = MAX_UNREAD_EVENTS
    ) -> None:
        self._loop = loop
        self._max_unread_events = max_unread_events
        self._pending: list[KeyedEvent] = []
        self._has_pending = asyncio.Event()

    def check_room(self) -> None:
        """Raises:
        QueueFull: too many events are unread.
        """
        if len(self._pending) >= self._max_unread_events:
            raise QueueFull(
                f"{len(self._pending)} events of this session are unread; "
                f"it may leave {self._max_unread_events}",
                reason="SESSION_UNREAD",
                retry_after_s=1.0,
            )

    def deliver(self, events: SequenceOf[KeyedEvent]) -> None:
        """Takes the events of one step; called on the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self.put, events)
        except RuntimeError:
            # The loop was closed by a stopping server; nobody reads any more.
            if not self._loop.is_closed():
                raise

    async def next_batch(self) -> list[KeyedEvent]:
        """Returns all pending events, in order; waits for at least one event, or for `wake`."""
        await self._has_pending.wait()
        self._has_pending.clear()
        batch, self._pending = self._pending, []
        return batch

    def put(self, events: SequenceOf[KeyedEvent]) -> None:
        """Appends events; called on the event loop."""
        self._pending.extend(events)
        self._has_pending.set()

    def wake(self) -> None:
        """Makes `next_batch` return, perhaps without events."""
        self._has_pending.set()


class OpenRequests:
    """The open requests of one RPC, by key. Used on the event loop.

    Attributes:
        stream: the events of all these requests.
    """

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.stream = EventQueue(asyncio.get_running_loop())
        self._records: dict[int, RequestRecord] = {}

    def begin(
        self, key: int, request_id: str, num_prompt: int, parent: str | None
    ) -> RequestRecord:
        """Opens a request, which counts from here on, failed or not; see `RequestRecord`."""
        record = RequestRecord(self.admission.telemetry, request_id, num_prompt, parent)
        self._records[key] = record
        self.admission.lifecycle.count(1)
        return record

    def take(self, key: int, event: Event) -> bool:
        """Records an event; returns False if its request was cancelled or timed out before."""
        record = self._records.get(key)
        if record is None:
            return False
        record.observe(event)
        if isinstance(event, Finished | Failed):
            self._close(key)
        return True

    def cancel(self, key: int) -> None:
        """Ends a request without an event. Unknown keys are ignored."""
        if key in self._records:
            self._close(key)
        self._stop(key)

    def end(self, key: int, event: Event) -> None:
        """Ends a request, whether it is queued, running or unread; `event` is its last event."""
        self._stop(key)
        self.stream.put([(key, event)])

    def cancel_all(self) -> None:
        """Cancels all open requests."""
        for key in tuple(self._records):
            self.cancel(key)

    def _stop(self, key: int) -> None:
        self.admission.engine.cancel(self.stream, key)

    def _close(self, key: int) -> None:
        self._records.pop(key).end()
        self.admission.lifecycle.count(-1)
