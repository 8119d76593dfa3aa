"""A child process with a log file: start, wait, stop, last lines."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path


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
