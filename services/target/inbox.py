"""The bounded queue from the event loop to the engine thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shared.errors import QueueFull

T = TypeVar("T")
Command = Callable[[], None]


class Inbox:
    """Commands for the engine thread, run in order at the start of a step.

    Posting never blocks. `post` drops nothing: a full inbox is an error for the poster.
    """

    def __init__(self, capacity: int) -> None:
        self._commands: queue.Queue[Command] = queue.Queue(capacity)

    def post(self, command: Command) -> None:
        """Queues a command.

        Raises:
            QueueFull: the engine is that far behind.
        """
        try:
            self._commands.put_nowait(command)
        except queue.Full:
            raise QueueFull.of(self._commands.qsize(), self._commands.maxsize) from None

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queues a function and returns the future of its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # handed to the caller, who waits for it
                future.set_exception(error)

        self.post(run)
        return future

    def run_all(self, *, wait_s: float | None = 0.0) -> None:
        """Runs every queued command; waits up to `wait_s` for the first, for ever on None."""
        command = self._next(wait_s)
        while command is not None:
            command()
            command = self._next(0.0)

    def _next(self, wait_s: float | None) -> Command | None:
        try:
            if wait_s is not None and wait_s <= 0.0:
                return self._commands.get_nowait()
            return self._commands.get(timeout=wait_s)
        except queue.Empty:
            return None
