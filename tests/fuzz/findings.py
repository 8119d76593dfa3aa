"""What a run of the fuzzer found, and how much it tried."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_PAGE_BYTES = 4096
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

    def add(self, what: str, sent: bytes) -> None:
        self.lines.append(f"{what}: {sent[:2000]!r}")

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
