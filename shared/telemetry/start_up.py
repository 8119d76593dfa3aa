"""Timelines of a process: the phases of its start, and its rounds for `--round-log`.

A phase is one log line:

    target INFO start-up phase=weights seconds=3.214 size_bytes=16060522496 gb_per_s=5.0

A phase inside another has both names, `draft/weights`, and its line comes first. Seconds are those
that the caller waits; work on other threads is not included.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)
MESSAGE = "start-up"
IMPORTS = "imports"
SERVING = "serving"
_OWN_STAT = Path("/proc/self/stat")
# Index among the 52 fields of proc(5)'s stat, counted after the one that may contain spaces.
_START_TICKS_FIELD = 19

_outer_phase: ContextVar[str] = ContextVar("outer_phase", default="")


@dataclass(slots=True)
class StartPhase:
    """A phase in progress.

    Attributes:
        size_bytes: bytes moved, if moving bytes is the phase's work; set before the phase ends.
    """

    size_bytes: int | None = None


@contextmanager
def start_phase(name: str, clock: Callable[[], float] = time.monotonic) -> Iterator[StartPhase]:
    """Logs how long its body takes, unless the body raises."""
    path = f"{_outer_phase.get()}{name}"
    token = _outer_phase.set(f"{path}/")
    phase, start_s = StartPhase(), clock()
    try:
        yield phase
    finally:
        _outer_phase.reset(token)
    _log(path, clock() - start_s, phase.size_bytes)


def log_process_age(name: str) -> None:
    """Logs the time since the process was started; does nothing outside Linux."""
    seconds = process_age_s()
    if seconds is not None:
        _log(name, seconds)


def process_age_s() -> float | None:
    """Returns the seconds since this process was started, to 10 ms; None outside Linux."""
    try:
        fields = _OWN_STAT.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    start_s = int(fields[_START_TICKS_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_s


def _log(path: str, seconds: float, size_bytes: int | None = None) -> None:
    facts: dict[str, str | float] = {"phase": path, "seconds": round(seconds, 3)}
    if size_bytes is not None:
        facts["size_bytes"] = size_bytes
        facts["gb_per_s"] = round(size_bytes / max(seconds, 1e-9) / 1e9, 2)
    logger.info(MESSAGE, extra=facts)


Fact = str | int | float


class RoundLog:
    """Timeline of one process as JSON lines, one per span or instant, for drawing rounds. Any
    thread may write.

    Times are of the host's monotonic clock, so the logs of processes on one host can be merged.
    Meant for seconds, not days: the file grows without limit.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file: TextIO = path.open("w", encoding="utf-8")

    def span(
        self, name: str, duration_s: float, *, end_s: float | None = None, **facts: Fact
    ) -> None:
        """Writes a span that ends at `end_s`, or now."""
        end_s = time.monotonic() if end_s is None else end_s
        self._write({"name": name, "start_s": end_s - duration_s, "end_s": end_s, **facts})

    def instant(self, name: str, **facts: Fact) -> None:
        """Writes an instant, at the current time."""
        self._write({"name": name, "at_s": time.monotonic(), **facts})

    def close(self) -> None:
        """Closes the file; later spans and instants are dropped."""
        with self._lock:
            self._file.close()

    def _write(self, record: dict[str, Fact]) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(record) + "\n")


def open_round_log(path: Path | None) -> RoundLog | None:
    """Returns the log of a path; None without a path."""
    return None if path is None else RoundLog(path)
