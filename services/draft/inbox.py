"""The draft engine's bounded queue: events of targets and calls of operators."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from services.draft.events import Event
from shared.errors import EngineFailed, QueueFull

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mail:
    """The queued events and calls, in order of arrival."""

    events: deque[Event]
    calls: deque[Callable[[], None]]


class Inbox:
    """Filled by any thread without blocking, emptied by the engine's."""

    def __init__(self, max_waiting_events: int) -> None:
        self._max_waiting_events = max_waiting_events
        self._wakeup = threading.Condition()
        self._mail = Mail(deque(), deque())
        self._promises: set[Future[Any]] = set()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._is_closed

    def put(self, event: Event) -> None:
        """Queues an event.

        Raises:
            QueueFull: too many wait; this one is lost.
            EngineFailed: nobody empties the inbox any more.
        """
        with self._wakeup:
            self._check_open()
            num_waiting = len(self._mail.events)
            if num_waiting >= self._max_waiting_events:
                raise QueueFull.of(num_waiting, self._max_waiting_events)
            self._mail.events.append(event)
            self._wakeup.notify()

    def put_regardless(self, event: Event) -> None:
        """Queues an event that is never refused."""
        with self._wakeup:
            self._mail.events.append(event)
            self._wakeup.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queues a call; the future gets what it returns or raises.

        Raises:
            EngineFailed: nobody empties the inbox any more.
        """
        with self._wakeup:
            self._check_open()
            promise: Future[T] = self.promise()
            self._mail.calls.append(lambda: _fulfil(promise, function))
            self._wakeup.notify()
        return promise

    def promise(self) -> Future[T]:
        """Returns a future that fails when the engine ends before anyone resolves it."""
        future: Future[T] = Future()
        self._promises.add(future)
        future.add_done_callback(self._promises.discard)
        return future

    def take(self, *, wait_s: float | None) -> Mail:
        """Empties the inbox.

        Args:
            wait_s: how long to wait until there is something, or the inbox is closed; None is for
                as long as it takes.
        """
        with self._wakeup:
            self._wakeup.wait_for(self._is_worth_waking, wait_s)
            mail, self._mail = self._mail, Mail(deque(), deque())
        return mail

    def close(self) -> None:
        """Refuses everything from now on, and wakes whoever waits in `take`."""
        with self._wakeup:
            self._is_closed = True
            self._wakeup.notify()

    def break_promises(self) -> None:
        """Fails every future that is still open."""
        for future in list(self._promises):
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineFailed.of())

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineFailed.of()

    def _is_worth_waking(self) -> bool:
        return bool(self._mail.events) or bool(self._mail.calls) or self._is_closed


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
