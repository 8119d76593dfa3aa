"""Events on their way from the engine thread to one RPC on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.target.request import Event

KeyedEvent = tuple[int, Event]


class EventStream:
    """An `EventSink` that an RPC reads in batches.

    A reader that lags gets the events of several steps in one batch. Memory is bounded by what
    the requests of the stream may generate, and the engine bounds the requests.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: list[KeyedEvent] = []
        self._has_pending = asyncio.Event()

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
