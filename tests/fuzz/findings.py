"""What a run of the fuzzer found, and how much it tried."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

MAX_SECONDS = 2.0  # that an answer may take
_PAGE_BYTES = 4096
_NUM_SHOWN = 20
_NUM_SAMPLES = 256  # of starvation, a minute of them
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


@dataclass
class Findings:
    """What went wrong, and how much was tried."""

    lines: list[str] = field(default_factory=list)
    num_http: int = 0
    num_raw: int = 0
    num_rpcs: int = 0
    num_drafts: int = 0
    slowest_s: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    starved: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))

    def add(self, what: str, sent: bytes) -> None:
        self.lines.append(f"{what}: {sent[:2000]!r}")
        if len(self.lines) <= _NUM_SHOWN:
            print(self.lines[-1], flush=True)

    def judge(self, begin_s: float, what: str, sent: bytes) -> None:
        """Notes what took too long, less the time for which the host ran others' processes."""
        duration_s = time.monotonic() - begin_s
        if duration_s > MAX_SECONDS:
            self.note_starvation()
            before = [delay_s for now_s, delay_s in self.starved if now_s <= begin_s]
            duration_s -= self.starved[-1][1] - (before[-1] if before else self.starved[0][1])
        self.slowest_s = max(self.slowest_s, duration_s)
        if duration_s > MAX_SECONDS:
            self.add(f"{what} took {duration_s:.1f} s", sent)

    def note_starvation(self) -> None:
        """Notes how long this process's threads have waited for a processor."""
        delay_ns = 0
        for schedule in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread that ended
                delay_ns += int(schedule.read_text().split()[1])
        self.starved.append((time.monotonic(), delay_ns / 1e9))

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
