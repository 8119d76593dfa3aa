"""Ordered shutdown of a process: refuse new work, finish running work, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from grpc import aio

from shared.rpc.lifecycle import Lifecycle

logger = logging.getLogger(__name__)
# For answers on their way out. Streams of health watchers never end by themselves, so a longer
# grace would always be waited out.
_LAST_ANSWERS_S = 0.25


async def stop_servers(
    servers: Sequence[aio.Server],
    lifecycle: Lifecycle,
    drain: Callable[[float], Awaitable[int]],
    *,
    grace_s: float,
) -> None:
    """Says NOT_SERVING, drains, then stops the servers in the order given.

    From the first moment `lifecycle.check_open` refuses new work. The maintenance server goes
    last, so that operators can watch the drain.

    Args:
        drain: asks drafts to detach and waits for running requests up to the given seconds;
            returns how many still run.
        grace_s: time allowed for `drain`, which is cut off when it takes longer.
    """
    await lifecycle.drain()
    try:
        async with asyncio.timeout(grace_s + _LAST_ANSWERS_S):
            num_running = await drain(grace_s)
    except TimeoutError:
        logger.error("the drain took longer than the %g s it was given; cut off", grace_s)
    else:
        level = logging.WARNING if num_running else logging.INFO
        logger.log(level, "drained; %d requests are cut off", num_running)
    for server in servers:
        await server.stop(_LAST_ANSWERS_S)
