"""A process of a benchmark: its log, the lines it is told, its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_GRACE_S = 20.0


class Child:
    """A Python module that runs until it is stopped."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._is_frozen = False

    @classmethod
    async def start(
        cls, module: str, arguments: Sequence[str], log: Path, *, is_read: bool = False
    ) -> Child:
        """Starts it; what it says is added to the log.

        Args:
            is_read: what it prints to stdout is left to `first_line`.
        """
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if is_read else file,
                stderr=file,
            )
        return cls(process)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def first_line(self) -> str:
        """Returns what it prints first."""
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()

    async def tell(self, line: str) -> None:
        """Writes a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    def freeze(self) -> None:
        """Stops it where it is, with its connections open."""
        self._process.send_signal(signal.SIGSTOP)
        self._is_frozen = True

    def thaw(self) -> None:
        """Lets it go on."""
        self._process.send_signal(signal.SIGCONT)
        self._is_frozen = False

    def kill(self) -> None:
        """Ends it without a chance to say so."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Asks it to end, and waits until it has; one that is frozen does not hear."""
        if not self._is_frozen:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _GRACE_S)
        self.kill()
        await self._process.wait()
