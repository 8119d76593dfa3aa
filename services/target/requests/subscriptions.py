"""The subscribers to each sequence's events, and the events of the step so far."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from services.target.requests.request import Event, EventSink, Failed
from services.target.sequence import Sequence
from shared.errors import OutriderError


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
