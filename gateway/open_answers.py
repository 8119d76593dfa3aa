"""How many answers are being generated: what a drain waits for."""

from __future__ import annotations

import asyncio
import contextlib


class OpenAnswers:
    """Counts answers between their first and their last byte.

    Attributes:
        num_open: HTTP requests, however many choices each has.
    """

    def __init__(self) -> None:
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self) -> None:
        self.num_open += 1
        self._idle.clear()

    def close(self) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self._idle.set()

    async def wait_idle(self, grace_s: float) -> int:
        """Waits until none is open, at most `grace_s` seconds; returns how many are left."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        return self.num_open
