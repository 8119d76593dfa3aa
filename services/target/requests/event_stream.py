"""Events on their way from the engine thread: to subscribers of sequences, and to one RPC."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from services.target.requests.request import Event, EventSink, Failed
from services.target.sequence import Sequence
from shared.errors import OutriderError, QueueFull


@dataclass(frozen=True, slots=True)
class _Subscription:
    sequence: Sequence
    sink: EventSink
    key: int


class Subscriptions:
    """Open sequences by id and by their caller's (sink, key). Owned by the engine thread."""

    def __init__(self) -> None:
        self._by_id: dict[int, _Subscription] = {}
        self._by_caller: dict[tuple[int, int], Sequence] = {}
        self._events: dict[EventSink, list[tuple[int, Event]]] = defaultdict(list)

    @property
    def sequences(self) -> list[Sequence]:
        """Every open sequence, oldest first."""
        return [subscription.sequence for subscription in self._by_id.values()]

    def add(self, sequence: Sequence, sink: EventSink, key: int) -> None:
        """Sends the sequence's events to `sink` under `key` from now on."""
        self._by_id[sequence.sequence_id] = _Subscription(sequence, sink, key)
        self._by_caller[id(sink), key] = sequence

    def find(self, sink: EventSink, key: int) -> Sequence | None:
        """Returns the open sequence of a caller."""
        return self._by_caller.get((id(sink), key))

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence's subscription; events emitted before are still delivered."""
        subscription = self._by_id.pop(sequence.sequence_id)
        del self._by_caller[id(subscription.sink), subscription.key]

    def emit(self, sequence: Sequence, event: Event) -> None:
        """Adds an event to the step's batch of the sequence's sink."""
        subscription = self._by_id[sequence.sequence_id]
        self._events[subscription.sink].append((subscription.key, event))

    def refuse(self, sink: EventSink, key: int, error: OutriderError) -> None:
        """Fails a request that never became a sequence."""
        self._events[sink].append((key, Failed(error)))

    def deliver(self) -> None:
        """Hands every sink its events since the last time, in one batch."""
        events, self._events = self._events, defaultdict(list)
        for sink, batch in events.items():
            sink.deliver(batch)

    def fail_all(self, error: OutriderError) -> None:
        """Fails and forgets every open sequence, and delivers that."""
        for subscription in self._by_id.values():
            self._events[subscription.sink].append((subscription.key, Failed(error)))
        self._by_id.clear()
        self._by_caller.clear()
        self.deliver()


KeyedEvent = tuple[int, Event]
MAX_UNREAD_EVENTS = 65_536


class EventStream:
    """An `EventSink` that an RPC reads in batches.

    A reader that lags gets the events of several steps in one batch. One that does not read at all
    gets no new requests once `is_full`; what those it has may still generate is the bound.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_unread_events: int = MAX_UNREAD_EVENTS
    ) -> None:
        self._loop = loop
        self._max_unread_events = max_unread_events
        self._pending: list[KeyedEvent] = []
        self._has_pending = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether the reader is so far behind that it must not ask for more."""
        return len(self._pending) >= self._max_unread_events

    def check_room(self) -> None:
        """Raises:
        QueueFull: the reader has to drain its queue first.
        """
        if self.is_full:
            raise QueueFull(
                f"{len(self._pending)} events of this session are unread; "
                f"it may leave {self._max_unread_events}",
                reason="SESSION_UNREAD",
                retry_after_s=1.0,
            )

    def deliver(self, events: SequenceOf[KeyedEvent]) -> None:
        """Takes the events of one step; called on the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._append, events)
        except RuntimeError:
            # The loop closed under a stopping server; nobody reads any more.
            if not self._loop.is_closed():
                raise

    async def next_batch(self) -> list[KeyedEvent]:
        """Returns everything pending, in order; waits for at least one event."""
        await self._has_pending.wait()
        self._has_pending.clear()
        batch, self._pending = self._pending, []
        return batch

    def put(self, key: int, event: Event) -> None:
        """Appends an event from the event loop itself."""
        self._append(((key, event),))

    def _append(self, events: SequenceOf[KeyedEvent]) -> None:
        self._pending.extend(events)
        self._has_pending.set()
