"""Messages on their way from the engine thread to one attached draft."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from services.target.drafts.attachment import DraftMessage


class DraftStream:
    """A `DraftPort` that the draft's RPC reads message by message.

    The queue is bounded: a draft that lets it fill does not keep up and is detached, since
    dropping one message would leave it with a wrong picture of its sequences.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, capacity: int) -> None:
        self._loop = loop
        self._capacity = capacity
        self._lock = threading.Lock()
        self._messages: deque[DraftMessage] = deque()
        self._is_closed = False
        self._has_news = asyncio.Event()

    def send(self, message: DraftMessage) -> bool:
        """Queues a message; False when the queue is full. Called on the engine thread."""
        with self._lock:
            if len(self._messages) >= self._capacity:
                return False
            self._messages.append(message)
        self._notify()
        return True

    def close(self) -> None:
        """Ends the stream after what is queued. Called on the engine thread."""
        with self._lock:
            self._is_closed = True
        self._notify()

    async def next(self) -> DraftMessage | None:
        """Returns the next message; None when the stream was closed."""
        while True:
            with self._lock:
                if self._messages:
                    return self._messages.popleft()
                if self._is_closed:
                    return None
            await self._has_news.wait()
            self._has_news.clear()

    def _notify(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._has_news.set)
        except RuntimeError:
            # The loop closed under a stopping server; nobody reads any more.
            if not self._loop.is_closed():
                raise
