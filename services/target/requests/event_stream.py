"""Events on their way from the engine thread to one RPC on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.target.requests.request import Event
from shared.errors import QueueFull

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

    def deliver(self, events: Sequence[KeyedEvent]) -> None:
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

    def _append(self, events: Sequence[KeyedEvent]) -> None:
        self._pending.extend(events)
        self._has_pending.set()
