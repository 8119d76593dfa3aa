"""A round log that is written only while it is wanted."""

from __future__ import annotations

from pathlib import Path

from shared.telemetry.start_up import Fact, RoundLog

LAST_RECORD = "switched off"


class SwitchedRoundLog(RoundLog):
    """Notes nothing while it is off, as at first; all it noted is in the file once it is again."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._is_on = False

    def turn(self, *, is_on: bool) -> None:
        """Turns it on or off."""
        if self._is_on and not is_on:
            self.instant(LAST_RECORD)
            self._file.flush()
        self._is_on = is_on

    def span(self, name: str, duration_s: float, **facts: Fact) -> None:
        if self._is_on:
            super().span(name, duration_s, **facts)

    def instant(self, name: str, **facts: Fact) -> None:
        if self._is_on:
            super().instant(name, **facts)
