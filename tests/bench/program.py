"""A program of `tests.bench` that `make bench` runs, and how it is ended before its time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

_GRACE_S = 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Program:
    """One of `tests.bench`.

    Attributes:
        fills: flag that takes a folder for files of a model's size, if there is one.
    """

    name: str
    arguments: tuple[str, ...] = ()
    fills: str | None = None
    num_gpus: int = 1

    def command(self, figures: Path, folder: Path) -> list[str]:
        """Returns the words that start it."""
        fills = () if self.fills is None else (self.fills, str(folder))
        words = (*self.arguments, *fills, "--figures", str(figures))
        return [sys.executable, "-m", f"tests.bench.{self.name}", *words]


class Stop:
    """The signal that asks this process to end, once one has come; used on a running loop.

    Attributes:
        signal: None until then.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._has_come = asyncio.Event()
        for each in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(each, self.ask, each)

    def ask(self, number: signal.Signals) -> None:
        """Notes the first signal."""
        self.signal = self.signal or number
        self._has_come.set()

    async def run(self, words: list[str]) -> int:
        """Runs a command to its end, or until the signal; returns its exit status."""
        # In a group of its own, so that what it has started ends with it.
        process = await asyncio.create_subprocess_exec(*words, start_new_session=True)
        ended, asked = (
            asyncio.ensure_future(each) for each in (process.wait(), self._has_come.wait())
        )
        await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not ended.done():
            _signal_group(process.pid, signal.SIGTERM)
            await asyncio.wait((ended,), timeout=_GRACE_S)
            _signal_group(process.pid, signal.SIGKILL)
        return await ended


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
