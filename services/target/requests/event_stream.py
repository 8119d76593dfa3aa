"""Turns requests into sequences, and delivers the events of sequences: from the engine thread to
each sink, and from an `EventStream` to the RPC that reads it."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from services.target.drafts.attachment import DraftRegistry
from services.target.requests.request import Event, EventSink, GenerationRequest, ModelLimits
from services.target.scheduler import Scheduler
from services.target.sequence import Sequence
from shared.errors import InvalidArgument, OutriderError, QueueFull
from shared.generation import Failed, Started


class Subscriptions:
    """Open sequences, by id and by their caller's (sink, key), from the admission queue to the last
    event. Owned by the engine thread."""

    def __init__(self, limits: ModelLimits, scheduler: Scheduler, drafts: DraftRegistry) -> None:
        self._limits, self._scheduler, self._drafts = limits, scheduler, drafts
        self._ids = itertools.count(1)
        self._by_id: dict[int, tuple[Sequence, EventSink, int]] = {}
        self._by_caller: dict[tuple[int, int], Sequence] = {}
        self._events: dict[EventSink, list[tuple[int, Event]]] = defaultdict(list)

    @property
    def sequences(self) -> list[Sequence]:
        """Every open sequence, oldest first."""
        return [sequence for sequence, _, _ in self._by_id.values()]

    def submit(self, request: GenerationRequest, sink: EventSink, key: int) -> None:
        """Queues a request, whose events go to `sink` under `key`. If the queue is full, or the
        request names an unknown algorithm, its event is `Failed`."""
        sequence = Sequence(next(self._ids), request, self._limits)
        try:
            self._drafts.check_algorithm(request.draft_algorithm)
            self._scheduler.submit(sequence)
        except (InvalidArgument, QueueFull) as error:
            self._events[sink].append((key, Failed(error)))
            return
        self._by_id[sequence.sequence_id] = (sequence, sink, key)
        self._by_caller[id(sink), key] = sequence

    def start(self, admitted: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Emits `Started` for the sequences that leave the queue for the first time, and returns
        them. The other admitted sequences had been preempted."""
        started = [sequence for sequence in admitted if not sequence.started]
        for sequence in started:
            sequence.started = True
            sequence.decided_s = now_s
            sequence.num_cached_tokens = sequence.num_computed
            queue_s = now_s - sequence.request.arrival_s
            self.emit(sequence, Started(sequence.num_cached_tokens, queue_s))
        return started

    def find(self, sink: EventSink, key: int) -> Sequence | None:
        """Returns the open sequence of a caller."""
        return self._by_caller.get((id(sink), key))

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence's subscription; events emitted before are still delivered."""
        _, sink, key = self._by_id.pop(sequence.sequence_id)
        del self._by_caller[id(sink), key]

    def emit(self, sequence: Sequence, event: Event) -> None:
        """Adds an event to the step's batch of the sequence's sink."""
        _, sink, key = self._by_id[sequence.sequence_id]
        self._events[sink].append((key, event))

    def deliver(self) -> None:
        """Delivers to every sink its events since the last call, in one batch."""
        events, self._events = self._events, defaultdict(list)
        for sink, batch in events.items():
            sink.deliver(batch)

    def fail_all(self, error: OutriderError) -> None:
        """Fails and removes every open sequence, and delivers the events."""
        for _, sink, key in self._by_id.values():
            self._events[sink].append((key, Failed(error)))
        self._by_id.clear()
        self._by_caller.clear()
        self.deliver()


KeyedEvent = tuple[int, Event]
MAX_UNREAD_EVENTS = 65_536


class EventStream:
    """An `EventSink` that an RPC reads in batches.

    A slow reader gets the events of several steps in one batch. A reader with too many unread
    events gets no new requests, see `check_room`; its open ones bound what is still added.
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
