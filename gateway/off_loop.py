"""Runs work in a thread that would block the event loop, and every stream with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.errors import DeadlineExceeded

T = TypeVar("T")
WORK_TIMEOUT_S = 30.0
# A separate pool, because work that has timed out still runs to its end.
_THREADS = ThreadPoolExecutor(2, "gateway-work")


async def off_loop(field: str, work: Callable[[], T], timeout_s: float = WORK_TIMEOUT_S) -> T:
    """Returns the result of `work`, which prepares the data of the request's `field`.

    Raises:
        DeadlineExceeded: the work takes too long, its wait for a thread included.
    """
    running = asyncio.get_running_loop().run_in_executor(_THREADS, work)
    try:
        return await asyncio.wait_for(running, timeout_s)
    except TimeoutError as error:
        message = f"{field} takes longer than {timeout_s:g} s to prepare"
        raise DeadlineExceeded(message, reason="REQUEST_TOO_SLOW") from error
