"""What a run of the fuzzer found, and how much it tried."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

MAX_SECONDS = 2.0  # that an answer may take
_PAGE_BYTES = 4096
_NUM_SHOWN = 20
_NUM_TRIES = 3  # of a late request, alone
_GROWTH_BYTES = 128 * 2**20  # of allocators and caches that fill up once


class BugLog(logging.Handler):
    """Takes what servers log as their own failures for findings."""

    def __init__(self, found: Findings) -> None:
        super().__init__(logging.ERROR)
        self._found = found
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        # grpc logs the end of a call whose client has gone as an exception of its servicer.
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return
        self._found.add(f"the log says {self.format(record)}", b"")


@dataclass(frozen=True)
class Suspect:
    """A request whose answer was late among others.

    `send` sends the same request again and returns the seconds until the answer's end.
    """

    what: str
    sent: bytes
    send: Callable[[], Awaitable[float]]


@dataclass
class Findings:
    """What went wrong, and how much was tried."""

    lines: list[str] = field(default_factory=list)
    num_http: int = 0
    num_raw: int = 0
    num_rpcs: int = 0
    num_drafts: int = 0
    slowest_s: float = 0.0  # of requests sent alone where they were late among others
    statuses: Counter[int] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)

    def add(self, what: str, sent: bytes) -> None:
        self.lines.append(f"{what}: {sent[:2000]!r}")
        if len(self.lines) <= _NUM_SHOWN:
            print(self.lines[-1], flush=True)

    def judge(
        self, duration_s: float, what: str, sent: bytes, send: Callable[[], Awaitable[float]]
    ) -> None:
        """Suspects a request whose answer took too long.

        Load, gateway and target share one process, and the host may be busy: lateness among other
        requests proves nothing. `try_suspects` sends the request again, alone.
        """
        if duration_s > MAX_SECONDS:
            self.suspects.append(Suspect(what, sent, send))
        else:
            self.slowest_s = max(self.slowest_s, duration_s)

    async def try_suspects(self) -> None:
        """Sends each suspect alone; one that is late every time is a finding."""
        for suspect in self.suspects:
            durations_s = [await suspect.send()]
            while durations_s[-1] > MAX_SECONDS and len(durations_s) < _NUM_TRIES:
                durations_s.append(await suspect.send())
            self.slowest_s = max(self.slowest_s, durations_s[-1])
            if durations_s[-1] > MAX_SECONDS:
                self.add(f"{suspect.what} took {min(durations_s):.1f} s alone", suspect.sent)

    def note_memory(self) -> None:
        """Notes what is in memory now."""
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        self.memory.append(resident * _PAGE_BYTES)

    def check_memory(self) -> None:
        """Compares the last quarter of a run with its second one."""
        quarter = len(self.memory) // 4
        if quarter:
            before, after = max(self.memory[quarter : 2 * quarter]), max(self.memory[-quarter:])
            if after - before > _GROWTH_BYTES:
                self.add(f"memory grew from {before:,} to {after:,} bytes", b"")

    @property
    def memory_line(self) -> str:
        shown = self.memory[:: max(len(self.memory) // 8, 1)]
        return "memory: " + " ".join(f"{each / 2**20:.0f}" for each in shown) + " MiB"
