"""Lifecycle of a process: starting, serving, draining."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from shared.errors import Unavailable


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
