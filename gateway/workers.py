"""`--workers N`: several gateway processes behind one port.

The kernel spreads connections over them. This process accepts none: it has the maintenance port,
starts the workers and stops them together. When one dies the gateway ends, as it would have alone,
and whoever started it starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import uvloop

from gateway.http_server import listen
from gateway.maintenance_service import drain_all, maintenance_server, summed_gauges
from gateway.process import response_store, serve, stop_on_signals
from gateway.settings import GatewaySettings
from gateway.worker_place import WorkerPlace
from shared.errors import EngineFailed, OutriderError
from shared.rpc.admin_service import AdminHooks, ProcessInfo
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.server import bind
from shared.settings import shown_settings
from shared.telemetry.logs import configure_logs
from shared.version import package_version

_STOP_GRACE_S = 10.0  # beyond the drain
_START_TIMEOUT_S = 300.0
_POLL_S = 0.05
_CALL_S = 5.0
_log = logging.getLogger(__name__)


async def serve_with_workers(settings: GatewaySettings) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises:
        SettingsError: the port is taken, or the store cannot be used.
        EngineFailed: a worker ended by itself.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    store = response_store(settings, is_shared=False)
    if store is not None:
        store.close()  # what a process before left unfinished is marked now, and only now
    admin_port = settings.admin_port
    listen(settings.host, settings.port).close()  # nobody else has it
    reserved = listen(settings.host, settings.port, is_shared=True, backlog=None)
    settings = replace(settings, port=reserved.getsockname()[1])
    with reserved, tempfile.TemporaryDirectory(prefix="outrider-gateway-") as folder:
        places = [
            WorkerPlace(index, settings.workers, Path(folder)) for index in range(settings.workers)
        ]
        await _supervise(settings, admin_port, places, stop)


async def _supervise(
    settings: GatewaySettings, admin_port: int, places: Sequence[WorkerPlace], stop: asyncio.Event
) -> None:
    lifecycle = Lifecycle([])
    info = ProcessInfo("gateway", package_version(), time.time(), shown_settings(settings))
    addresses = [place.maintenance_address for place in places]
    hooks = AdminHooks(
        drain=lambda grace_s: drain_all(addresses, grace_s), gauges=lambda: summed_gauges(addresses)
    )
    maintenance = await maintenance_server(info, lifecycle, hooks)
    bind(maintenance, f"{settings.maintenance_host}:{admin_port}", settings.server_tls)
    await maintenance.start()
    workers = [_start(settings, place) for place in places]
    ended = asyncio.Event()
    for worker in workers:
        asyncio.get_running_loop().add_reader(worker.sentinel, ended.set)
    try:
        await _first(stop, ended, asyncio.create_task(_activate(lifecycle, places)))
    finally:
        dead: list[BaseProcess] = []
        if not stop.is_set():  # its pipe closes a little before its exit code is there
            await _until(lambda: any(worker.exitcode is not None for worker in workers), _CALL_S)
            dead = [worker for worker in workers if worker.exitcode is not None]
        await lifecycle.drain()
        await _stop(workers, settings.drain_grace_s + _STOP_GRACE_S)
        await maintenance.stop(0.0)
    if dead:
        message = f"{dead[0].name} ended with exit code {dead[0].exitcode}"
        raise EngineFailed(message, reason="WORKER_ENDED")


def _start(settings: GatewaySettings, place: WorkerPlace) -> BaseProcess:
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=_work, args=(settings, place), name=f"worker {place.index}")
    worker.start()
    return worker


def _work(settings: GatewaySettings, place: WorkerPlace) -> None:
    """Runs in the worker."""
    configure_logs("gateway", level=settings.log_level, log_format=settings.log_format)
    try:
        uvloop.run(serve(settings, place))
    except OutriderError as error:
        sys.exit(f"outrider-gateway: worker {place.index}: {error.message}")


async def _first(stop: asyncio.Event, ended: asyncio.Event, activation: asyncio.Task[None]) -> None:
    waits = [asyncio.create_task(event.wait()) for event in (stop, ended)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in (*waits, activation):
        each.cancel()


async def _activate(lifecycle: Lifecycle, places: Sequence[WorkerPlace]) -> None:
    """Serves once every worker does."""
    await _until(lambda: all(place.http_path.exists() for place in places), _START_TIMEOUT_S)
    await lifecycle.activate()
    _log.info("workers serve", extra={"count": len(places)})


async def _stop(workers: Sequence[BaseProcess], grace_s: float) -> None:
    for worker in workers:
        worker.terminate()
    await _until(lambda: all(worker.exitcode is not None for worker in workers), grace_s)
    for worker in workers:
        worker.kill()
        worker.join()


async def _until(is_so: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        if is_so() or time.monotonic() > deadline_s:
            return
        await asyncio.sleep(_POLL_S)
