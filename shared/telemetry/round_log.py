"""Timeline of one process as JSON lines, one a span or instant, for drawing rounds.

Times are of the host's monotonic clock, so the logs of processes on one host fit together. Meant
for seconds, not days: nothing bounds the file.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TextIO

Fact = str | int | float


class RoundLog:
    """Writes a file. Any thread may call it.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file: TextIO = path.open("w", encoding="utf-8")

    def span(
        self, name: str, duration_s: float, *, end_s: float | None = None, **facts: Fact
    ) -> None:
        """Notes something that ends now, or ended before."""
        end_s = time.monotonic() if end_s is None else end_s
        self._write({"name": name, "start_s": end_s - duration_s, "end_s": end_s, **facts})

    def instant(self, name: str, **facts: Fact) -> None:
        """Notes something that happens now."""
        self._write({"name": name, "at_s": time.monotonic(), **facts})

    def close(self) -> None:
        """Writes the rest; nothing is noted from then on."""
        with self._lock:
            self._file.close()

    def _write(self, record: dict[str, Fact]) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(record) + "\n")


def open_round_log(path: Path | None) -> RoundLog | None:
    """Returns a log, or none where none is wanted."""
    return None if path is None else RoundLog(path)
