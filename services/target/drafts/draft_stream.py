"""Messages on their way from the engine thread to one attached draft."""

from __future__ import annotations

import asyncio
from collections import deque

from services.target.drafts.attachment import DraftMessage


class DraftStream:
    """A `DraftPort` that the draft's RPC reads message by message.

    The queue is bounded: a draft that lets it fill does not keep up and is detached, since
    dropping one message would leave it with a wrong picture of its sequences. It needs no lock: the
    engine thread alone adds, the event loop alone takes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, capacity: int) -> None:
        self._loop = loop
        self._capacity = capacity
        self._messages: deque[DraftMessage] = deque()
        self._graces_s: deque[float] = deque()
        self._is_closed = False
        self._has_news = asyncio.Event()

    def send(self, message: DraftMessage) -> bool:
        """Queues a message; False when the queue is full. Called on the engine thread."""
        if len(self._messages) >= self._capacity:
            return False
        self._messages.append(message)
        self._notify()
        return True

    def close(self) -> None:
        """Ends the stream after what is queued. Called on the engine thread."""
        self._is_closed = True
        self._notify()

    def drain(self, grace_s: float) -> None:
        """Has the draft asked to detach within the grace, before it gets what is queued. On the
        event loop, as all that follows."""
        self._graces_s.append(grace_s)
        self.wake()

    def wake(self) -> None:
        """Ends the wait in `news`."""
        self._has_news.set()

    async def news(self) -> None:
        """Waits until there is something to take, the stream is over, or `wake` was called. For one
        reader, which looks at everything before it waits again."""
        # Whoever adds something sets the event behind it, so what is overlooked here is told once
        # more; an event that is left over costs one look in vain.
        if not (self._messages or self._is_closed):
            await self._has_news.wait()
            self._has_news.clear()

    def take(self) -> DraftMessage | None:
        """Returns the next message; None when there is none."""
        return self._messages.popleft() if self._messages else None

    def take_grace_s(self) -> float | None:
        """Returns the grace of the next `drain`; None when there is none."""
        return self._graces_s.popleft() if self._graces_s else None

    @property
    def is_over(self) -> bool:
        """Whether the stream was closed and nothing is left to take."""
        # In this order: once it is closed, nothing is queued any more.
        return self._is_closed and not self._messages

    def _notify(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._has_news.set)
        except RuntimeError:
            # The loop closed under a stopping server; nobody reads any more.
            if not self._loop.is_closed():
                raise
