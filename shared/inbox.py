"""The bounded queue of commands from other threads, such as an event loop, to an engine thread."""

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

    Posting never waits for the engine, and drops nothing. Commands that start work are refused when
    the inbox is full or closed. Commands that end work are always accepted, or the engine would
    continue work that nobody waits for. Calls have a separate bound, so that operators are answered
    however many commands peers have posted.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._num_calls = 0  # calls in the queue
        self._refusal: Callable[[], OutriderError] | None = None
        self._lock = threading.Lock()

    def post(self, command: Command) -> None:
        """Queues a command.

        Raises:
            QueueFull: the queue is at its capacity.
            OutriderError: the inbox is closed; see `close`.
        """
        with self._lock:
            self._check(self._commands.qsize() - self._num_calls)
            self._commands.put(command)

    def post_end(self, command: Command) -> None:
        """Queues a command that ends what an earlier command began. There is at most one for each
        of these, so they need no bound."""
        self._commands.put(command)

    def close(self, refusal: Callable[[], OutriderError]) -> None:
        """Refuses commands from now on. All accepted commands are in the queue once this returns,
        so a last `run_all` runs every one of them.

        Args:
            refusal: returns the error for later commands; the first `close` sets it.
        """
        with self._lock:
            self._refusal = self._refusal or refusal

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queues a function and returns the future of its result.

        Raises:
            QueueFull: `capacity` calls are queued.
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
            except Exception as error:  # passed to the caller by the future
                future.set_exception(error)

        with self._lock:
            self._check(self._num_calls)
            self._num_calls += 1
            self._commands.put(run)
        return future

    def run_all(self, *, wait_s: float | None = 0.0) -> None:
        """Runs every queued command; waits up to `wait_s` for the first, without limit if None."""
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
