"""Something that happens once, in the middle of a pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any


class Trigger:
    """Acts when enough tokens have come.

    Args:
        num_tokens: how many come before.

    Attributes:
        at_s: when the act was done, by the clock of answers; infinite before.
    """

    def __init__(
        self,
        act: Callable[[], Coroutine[Any, Any, None]],
        num_tokens: int,
    ) -> None:
        self.at_s = float("inf")
        self._act = act
        self._num_left = num_tokens
        self._task: asyncio.Task[None] | None = None

    def count(self, num_tokens: int) -> None:
        """Tokens have come."""
        self._num_left -= num_tokens
        if self._num_left <= 0 and self._task is None:
            self._task = asyncio.create_task(self._run())

    async def done(self) -> None:
        """Waits for the act, if it has begun."""
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        await self._act()
        self.at_s = time.perf_counter()
