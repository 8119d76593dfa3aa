"""Lifecycle of a process: starting, serving, draining, and its ordered shutdown."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from shared.errors import Unavailable

logger = logging.getLogger(__name__)
# For answers on their way out. Streams of health watchers never end by themselves, so a longer
# grace would always be waited out.
_LAST_ANSWERS_S = 0.25


class State(enum.Enum):
    """Lifecycle of a process."""

    STARTING = "starting"
    ACTIVE = "active"
    DRAINING = "draining"


class Lifecycle:
    """Holds the state and drives every health service of the process with it.

    Health is SERVING in ACTIVE only. The empty name stands for the whole process.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self.state = State.STARTING
        self._names = ("", *service_names)
        self._health: list[HealthServicer] = []

    async def new_health_servicer(self) -> HealthServicer:
        """Returns a health servicer for one server of the process."""
        servicer = HealthServicer()
        self._health.append(servicer)
        await self._show(servicer)
        return servicer

    async def activate(self) -> None:
        """The process serves from now on."""
        await self._enter(State.ACTIVE)

    async def drain(self) -> None:
        """The process finishes what runs and takes nothing new."""
        await self._enter(State.DRAINING)

    def check_open(self) -> None:
        """Returns when new work may come.

        Raises:
            Unavailable: the process is draining; another one may serve.
        """
        if self.state is State.DRAINING:
            raise Unavailable.draining()

    async def _enter(self, state: State) -> None:
        self.state = state
        for servicer in self._health:
            await self._show(servicer)

    async def _show(self, servicer: HealthServicer) -> None:
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
