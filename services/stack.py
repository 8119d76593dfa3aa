"""Processes that serve together, each with a log: start, wait until ready, watch, stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import MISFIT_EXIT_CODE

_POLL_INTERVAL_S = 0.1
_TAIL_LINES = 20
_MOMENT_S = 1.0
"""Between SIGTERM and SIGKILL for parts that must stop at once."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The command of a child process.

    Attributes:
        name: for messages, for example `target`.
        module: Python module to run, with this interpreter.
        arguments: of the module.
        log_file: takes stdout and stderr; emptied at the first start, appended to afterwards.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    log_file: Path


class Child:
    """One process at a time of a `ChildSpec`. Owned by one event loop."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def process_id(self) -> int | None:
        """None before the first start."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the process in a group of its own, so that Ctrl-C reaches the launcher alone."""
        assert not self.is_running
        mode = "wb" if self._process is None else "ab"
        with self.spec.log_file.open(mode) as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.bound",
                self.spec.module,
                *self.spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    async def wait(self) -> int:
        """Returns the exit code; below zero is the signal that ended the process."""
        assert self._process is not None, "wait() comes after start()"
        return await self._process.wait()

    async def stop(self, grace_s: float) -> bool:
        """Sends SIGTERM, and SIGKILL after `grace_s`. Returns whether SIGTERM was enough."""
        if not self.is_running:
            return True
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self.wait()
            return False
        return True

    def log_tail(self, num_lines: int) -> str:
        with self.spec.log_file.open(errors="replace") as log:
            return "".join(deque(log, num_lines)).rstrip()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # it ended by itself in between
            self._process.send_signal(number)


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the stack.

    Attributes:
        child: the process.
        is_ready: polled until it returns true.
        is_expendable: without it serving is only slower; if it dies, it is started again instead of
            ending the stack.
        hint: advice for the user, reported if the process ends before every part is ready because
            its models do not fit.
        is_back: replaces `is_ready` after a restart; None is `is_ready`.
    """

    child: Child
    is_ready: Callable[[], Awaitable[bool]]
    is_expendable: bool = False
    hint: str | None = None
    is_back: Callable[[], Awaitable[bool]] | None = None


@dataclass(frozen=True, slots=True)
class StackTimeouts:
    """Timeouts and backoffs of the stack, in seconds.

    Attributes:
        start_s: until every part is ready.
        stop_s: between SIGTERM and SIGKILL, for each part; above the services' drain grace.
        first_backoff_s: before an expendable part is started again; doubles with every death.
        longest_backoff_s: upper bound of the doubled backoff.
        healthy_s: a part that lived longer is started again after `first_backoff_s`.
        first_word_s: until a slow start reports which part is not ready; doubles with every report.
    """

    start_s: float = 600.0
    stop_s: float = 35.0
    first_backoff_s: float = 1.0
    longest_backoff_s: float = 30.0
    healthy_s: float = 60.0
    first_word_s: float = 15.0


class PartDied(Exception):
    """A process ended without which the stack cannot serve."""


class Stack:
    """Runs its parts, given in start order; they stop in reverse.

    Args:
        report: takes one line (or a log excerpt) for the person in front of the terminal.
    """

    def __init__(
        self, parts: Sequence[Part], timeouts: StackTimeouts, report: Callable[[str], None]
    ) -> None:
        self._parts = tuple(parts)
        self._timeouts = timeouts
        self._report = report
        self._all_ready = False

    async def run(
        self, stop: asyncio.Event, announce: Callable[[], None], at_once: asyncio.Event
    ) -> int:
        """Serves until `stop` is set (returns 0) or a part dies for good (returns 1).

        Args:
            at_once: ends all parts that are left, without an order or a grace.
        """
        try:
            for part in self._parts:
                await part.child.start()
            watches = (self._keep(part) for part in self._parts)  # each ends only by raising
            await _first_of(stop.wait(), self._announce_when_ready(announce), *watches)
            return 0
        except (PartDied, TimeoutError) as error:
            self._report(str(error))
            return 1
        finally:
            await _first_of(self._stop_in_order(), at_once.wait())
            await asyncio.gather(*(part.child.stop(_MOMENT_S) for part in self._parts))

    async def _announce_when_ready(self, announce: Callable[[], None]) -> None:
        started = time.monotonic()
        next_word_s = self._timeouts.first_word_s
        for part in self._parts:
            while not await part.is_ready():
                waited_s = time.monotonic() - started
                if waited_s > self._timeouts.start_s:
                    late = f"{part.child.spec.name} is not ready after {self._timeouts.start_s:g} s"
                    raise TimeoutError(f"{late}\n{_excerpt(part.child)}")
                if waited_s > next_word_s:
                    spec = part.child.spec
                    self._report(f"waiting for {spec.name} since {waited_s:.0f} s: {spec.log_file}")
                    next_word_s = 2 * waited_s
                await asyncio.sleep(_POLL_INTERVAL_S)
        self._all_ready = True
        announce()
        await asyncio.Event().wait()

    async def _keep(self, part: Part) -> None:
        """Waits for the part's death, and starts an expendable part again."""
        backoff_s = self._timeouts.first_backoff_s
        returning: asyncio.Task[None] | None = None
        while True:
            started = time.monotonic()
            try:
                exit_code = await part.child.wait()
            finally:
                if returning is not None:
                    returning.cancel()
            ended = f"{part.child.spec.name} ended with exit code {exit_code}"
            if not (part.is_expendable and self._all_ready):
                has_hint = part.hint is not None and exit_code == MISFIT_EXIT_CODE
                hint = f"\n{part.hint}" if has_hint else ""
                raise PartDied(f"{ended}\n{_excerpt(part.child)}{hint}")
            if time.monotonic() - started > self._timeouts.healthy_s:
                backoff_s = self._timeouts.first_backoff_s
            self._report(f"{ended}; serving goes on without it, next start in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            await part.child.start()
            returning = asyncio.create_task(self._report_return(part))
            backoff_s = min(2 * backoff_s, self._timeouts.longest_backoff_s)

    async def _report_return(self, part: Part) -> None:
        is_back = part.is_back or part.is_ready
        while not await is_back():  # noqa: ASYNC110 - another process can only be polled
            await asyncio.sleep(_POLL_INTERVAL_S)
        self._report(f"{part.child.spec.name} is back")

    async def _stop_in_order(self) -> None:
        for part in reversed(self._parts):
            if not await part.child.stop(self._timeouts.stop_s):
                name, grace_s = part.child.spec.name, self._timeouts.stop_s
                self._report(f"{name} did not stop within {grace_s:g} s and was killed")


def _excerpt(child: Child) -> str:
    return f"last lines of {child.spec.log_file}:\n{child.log_tail(_TAIL_LINES)}"


async def _first_of(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Waits for the first coroutine to end, cancels the others and raises that one's error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
