"""A queue for the events of one HTTP request until its task reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from gateway.generation import Delta, Event
from gateway.rounds import NodeBudget
from shared.errors import Cancelled, OutriderError, StatusCode

IndexedEvent = tuple[int, Event]
TakeNow = Callable[[int, Delta], bool]


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


class Aborted(Cancelled):
    """Somebody aborted the request by its id."""

    @classmethod
    def of(cls, request_id: str) -> Self:
        return cls(f"request {request_id} was aborted", reason="REQUEST_ABORTED")


class ClientTooSlow(OutriderError):
    """The client did not read for so long that its backlog reached the bound."""

    code = StatusCode.RESOURCE_EXHAUSTED

    @classmethod
    def of(cls, limit: int) -> Self:
        message = f"the client left more than {limit:,} tokens unread"
        return cls(message, reason="CLIENT_TOO_SLOW")


class Inbox:
    """Events by choice index, in the order they happened.

    The session's reader puts and never waits: one slow client must not hold up the others that
    share the stream. What a client leaves unread is bounded by tokens; at the bound the backlog is
    dropped and `on_overflow` called once. Rounds lose their trees before they cost too much.

    Attributes:
        take_now: takes a delta at once where the task waits for nothing else, which saves waking
            it; returns False to leave it to the task.
    """

    def __init__(self, max_unread_tokens: int, on_overflow: Callable[[], None]) -> None:
        self._max_unread_tokens = max_unread_tokens
        self._on_overflow = on_overflow
        self.take_now: TakeNow | None = None
        self._events: list[IndexedEvent] = []
        self._num_unread_tokens = 0
        self._nodes = NodeBudget()
        self._closed: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, event: Event) -> None:
        """Adds an event; ignored after `close` and `end`."""
        if self._closed is not None:
            return
        if isinstance(event, Delta):
            is_awaited = self._waiter is not None and not self._events
            if is_awaited and self.take_now is not None and self.take_now(index, event):
                return
            self._num_unread_tokens += len(event.token_ids)
            if event.round is not None:
                event.round = self._nodes.admit(event.round)
            if self._num_unread_tokens > self._max_unread_tokens:
                self.close(ClientTooSlow.of(self._max_unread_tokens))
                self._on_overflow()
                return
        self._events.append((index, event))
        self.wake()

    def close(self, reason: Exception) -> None:
        """Drops what is unread and makes `take` raise `reason`."""
        if self._closed is None:
            self._closed = reason
            self._events.clear()
            self.wake()

    def end(self, reason: Exception) -> None:
        """Lets what is unread be taken, then makes `take` raise `reason`."""
        if self._closed is None:
            self._closed = reason
            self.wake()

    async def take(self) -> list[IndexedEvent]:
        """Returns all unread events; none only when `wake` was called.

        Raises:
            ClientGone, ClientTooSlow, Aborted: what `close` or `end` was given.
        """
        if not self._events and self._closed is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._events and self._closed is not None:
            raise self._closed
        events, self._events = self._events, []
        self._num_unread_tokens = 0
        self._nodes.reset()
        return events

    def wake(self) -> None:
        """Lets a `take` that waits return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
