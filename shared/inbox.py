"""The bounded queue from other threads, such as an event loop, to an engine's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shared.errors import OutriderError, QueueFull

T = TypeVar("T")
Command = Callable[[], None]


class Inbox:
    """Commands for the engine thread, run in order at the start of a step.

    Posting never waits for the engine and drops nothing. What asks for work is refused when the
    inbox is full or closed; what ends work never is, or the engine would go on with what nobody
    waits for. Calls have a bound of their own: however much peers have sent, operators are
    answered behind it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._num_calls = 0  # that wait
        self._refusal: Callable[[], OutriderError] | None = None
        self._lock = threading.Lock()

    def post(self, command: Command) -> None:
        """Queues a command.

        Raises:
            QueueFull: the engine is that far behind.
            OutriderError: the inbox is closed; see `close`.
        """
        with self._lock:
            self._check(self._commands.qsize() - self._num_calls)
            self._commands.put(command)

    def post_end(self, command: Command) -> None:
        """Queues a command that ends what an earlier one began; no more of them come than of
        those, so they need no bound."""
        self._commands.put(command)

    def close(self, refusal: Callable[[], OutriderError]) -> None:
        """Refuses work from now on. Whatever was taken before is in the queue once this returns, so
        that a last `run_all` leaves nobody without an answer.

        Args:
            refusal: the error for later submissions; that of the first `close` counts.
        """
        with self._lock:
            self._refusal = self._refusal or refusal

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queues a function and returns the future of its result.

        Raises:
            QueueFull: as many calls wait as commands may.
            OutriderError: the inbox is closed; see `close`.
        """
        future: Future[T] = Future()

        def run() -> None:
            with self._lock:
                self._num_calls -= 1
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # handed to the caller, who waits for it
                future.set_exception(error)

        with self._lock:
            self._check(self._num_calls)
            self._num_calls += 1
            self._commands.put(run)
        return future

    def run_all(self, *, wait_s: float | None = 0.0) -> None:
        """Runs every queued command; waits up to `wait_s` for the first, for ever on None."""
        is_waiting = wait_s is None or wait_s > 0.0
        while True:
            try:
                command = self._commands.get(is_waiting, wait_s if is_waiting else None)
            except queue.Empty:
                return
            is_waiting = False
            command()

    def _check(self, num_waiting: int) -> None:
        if self._refusal is not None:
            raise self._refusal()
        if num_waiting >= self._capacity:
            raise QueueFull.of(num_waiting, self._capacity)
