"""Lifecycle of a process: its state, its open requests, and its ordered shutdown."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from shared.errors import Unavailable

logger = logging.getLogger(__name__)
# Time to send the last responses. Streams of health watchers never end by themselves, so a longer
# grace would always be used up.
_RESPONSE_GRACE_S = 0.25


class State(enum.Enum):
    """Lifecycle of a process."""

    STARTING = "starting"
    ACTIVE = "active"
    DRAINING = "draining"


class Lifecycle:
    """Holds the state of a process and reports it by all of its health services.

    Health is SERVING only in ACTIVE. The empty service name is the whole process.

    Attributes:
        num_open: requests that have not ended; a drain waits for them.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self.state = State.STARTING
        self.num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._names = ("", *service_names)
        self._health: list[HealthServicer] = []

    async def new_health_servicer(self) -> HealthServicer:
        """Returns a health servicer for one server of the process."""
        servicer = HealthServicer()
        self._health.append(servicer)
        await self._update_health(servicer)
        return servicer

    async def activate(self) -> None:
        """Lets the process serve."""
        await self._enter(State.ACTIVE)

    async def drain(self) -> None:
        """Lets the process finish its requests and refuse new ones."""
        await self._enter(State.DRAINING)

    def check_open(self) -> None:
        """Raises:
        Unavailable: the process is draining; another one may serve.
        """
        if self.state is State.DRAINING:
            raise Unavailable.draining()

    def count(self, num_more: int) -> None:
        """Counts opened requests; -1 for a request that has ended. Called on the event loop."""
        self.num_open += num_more
        if self.num_open:
            self._is_idle.clear()
        else:
            self._is_idle.set()

    async def wait_idle(self, timeout_s: float) -> int:
        """Waits at most `timeout_s` until no request is open; returns how many still are."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        return self.num_open

    async def _enter(self, state: State) -> None:
        self.state = state
        for servicer in self._health:
            await self._update_health(servicer)

    async def _update_health(self, servicer: HealthServicer) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await servicer.set(name, serving if self.state is State.ACTIVE else not_serving)


async def stop_servers(
    servers: Sequence[aio.Server],
    lifecycle: Lifecycle,
    drain: Callable[[float], Awaitable[int]],
    *,
    grace_s: float,
) -> None:
    """Reports NOT_SERVING, drains, then stops the servers in the given order.

    `lifecycle.check_open` refuses new work from the start. The maintenance server is the last one,
    so that operators can watch the drain.

    Args:
        drain: asks drafts to detach and waits for running requests up to the given seconds;
            returns the number of running requests.
        grace_s: time for `drain`, which is cancelled if it takes longer.
    """
    await lifecycle.drain()
    try:
        async with asyncio.timeout(grace_s + _RESPONSE_GRACE_S):
            num_running = await drain(grace_s)
    except TimeoutError:
        logger.error("the drain took longer than the %g s it was given; cut off", grace_s)
    else:
        level = logging.WARNING if num_running else logging.INFO
        logger.log(level, "drained; %d requests are cut off", num_running)
    for server in servers:
        await server.stop(_RESPONSE_GRACE_S)
