"""Counts the requests that clients wait for, so that a drain can end when there are none."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class OpenRequests:
    """A count on the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def add(self) -> None:
        """A request was opened."""
        self.count += 1
        self._is_idle.clear()

    def remove(self) -> None:
        """A request finished, failed or was cancelled."""
        self.count -= 1
        if self.count == 0:
            self._is_idle.set()

    async def wait_idle(self, timeout_s: float) -> int:
        """Waits until none is open, at most `timeout_s`; returns how many are left."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        return self.count
