"""The gateway's processes: their parts, their maintenance port, their start and their stop.

With `--workers N` several processes share one port, and the kernel spreads connections over them.
The first process accepts no connections: it has the maintenance port, starts the workers and stops
them together. When one worker dies the whole gateway ends, as a single process would, so that its
supervisor starts it again."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import uvloop
from grpc import aio

from gateway.api_keys import Quotas
from gateway.app import create_app
from gateway.http_server import HttpServer, listen
from gateway.model_text import ModelText
from gateway.pool import TargetPool
from gateway.responses.store import MEMORY, ResponseStore
from gateway.serving import Gateway
from gateway.settings import GatewaySettings
from gateway.workers import WorkerPlace
from shared.errors import EngineFailed, OutriderError
from shared.garbage import collect_from_here
from shared.model_files import tokenizer_sha256
from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.rpc.admin_service import AdminHooks, AdminServicer, ProcessInfo
from shared.rpc.channel import open_channel
from shared.rpc.server import Lifecycle, bind, create_server
from shared.settings import shown_settings
from shared.signals import stop_event
from shared.telemetry.logs import configure_logs
from shared.telemetry.tracing import tracer_for
from shared.version import package_version

_MAX_RECEIVE_BYTES = 64 * 1024  # requests to AdminService are a few numbers
_CALL_S = 5.0
_ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]

_FLUSH_GRACE_S = 2  # for ended generations whose last bytes are not sent yet
_STOP_GRACE_S = 10.0  # for a worker to exit after its drain
_START_TIMEOUT_S = 300.0
_POLL_S = 0.05
_log = logging.getLogger(__name__)


async def maintenance_server(
    info: ProcessInfo, lifecycle: Lifecycle, hooks: AdminHooks
) -> aio.Server:
    """Returns the maintenance server, neither bound nor started."""

    def register(server: aio.Server) -> None:
        servicer = AdminServicer(info, lifecycle, hooks)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)

    return await create_server([_ADMIN], register, lifecycle, max_receive_bytes=_MAX_RECEIVE_BYTES)


async def drain_all(addresses: Sequence[str], grace_s: float) -> int:
    """Drains the workers with these maintenance addresses; returns how many requests still run."""
    request = admin_service_pb2.DrainServerRequest()
    request.grace_duration.FromNanoseconds(round(grace_s * 1e9))

    async def drain(address: str) -> int:
        async with open_channel(address) as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            answer = await stub.DrainServer(request, timeout=grace_s + _CALL_S)
        return int(answer.running_request_count)

    return sum(await asyncio.gather(*map(drain, addresses)))


async def summed_gauges(addresses: Sequence[str]) -> Mapping[str, float]:
    """Returns the sums of the workers' gauges, and the number of workers that answer."""
    total: Counter[str] = Counter(worker_count=0)
    for address in addresses:
        with suppress(aio.AioRpcError):
            async with open_channel(address) as channel:
                stub = admin_service_pb2_grpc.AdminServiceStub(channel)
                request = admin_service_pb2.GetServerInfoRequest()
                info = await stub.GetServerInfo(request, timeout=_CALL_S)
            total.update({"worker_count": 1, **info.gauges})
    return total


async def serve(settings: GatewaySettings, place: WorkerPlace | None = None) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        place: this worker's index and sockets; None for the only process.
    """
    stop = stop_event()
    gateway = _compose(settings, place)
    hooks = AdminHooks(drain=gateway.lifecycle.wait_idle, gauges=lambda: _gauges(gateway))
    info = ProcessInfo("gateway", gateway.version, gateway.start_time_s, shown_settings(settings))
    maintenance = await maintenance_server(info, gateway.lifecycle, hooks)
    app = create_app(gateway)
    listener = listen(settings.host, settings.port, is_shared=place is not None)
    http = HttpServer(app, listener, settings)
    servers = [http]
    if place is None:
        address = f"{settings.maintenance_host}:{settings.admin_port}"
        bind(maintenance, address, settings.server_tls)
    else:
        bind(maintenance, place.maintenance_address)
        servers.append(HttpServer(app, place.http_path, settings))
        stop_with_parent(stop)
    await maintenance.start()
    gateway.pool.start()
    for server in servers:
        server.start()
    collect_from_here()
    await gateway.lifecycle.activate()
    try:
        await http.run_until(stop)
    finally:
        await gateway.lifecycle.drain()
        if await gateway.lifecycle.wait_idle(settings.drain_grace_s):
            gateway.end_answers(settings.drain_grace_s)
        for server in servers:
            await server.stop(_FLUSH_GRACE_S)
        await gateway.pool.close()
        await maintenance.stop(0.0)
        if gateway.response_store is not None:
            gateway.response_store.close()
        gateway.tracer.close()


def _compose(settings: GatewaySettings, place: WorkerPlace | None) -> Gateway:
    """Raises:
    CheckpointError: the tokenizer's folder cannot be used.
    """
    read = partial(ModelText.read, settings.tokenizer, settings.max_prompt_characters)
    return Gateway(
        settings,
        TargetPool(settings, tokenizer_sha256(settings.tokenizer)),
        read(tools=settings.tool_call_parser, reasoning=settings.reasoning_parser),
        Quotas(settings.api_keys, settings.key_limits, never_learnt=settings.never_learn_from),
        place,
        response_store(settings, is_shared=place is not None),
        tracer_for("gateway", settings.otlp_endpoint, settings.trace_sample_ratio),
    )


def response_store(settings: GatewaySettings, *, is_shared: bool) -> ResponseStore | None:
    """Returns the store of the settings; None when it is off.

    Args:
        is_shared: other workers have the file open, and their running responses are left alone.

    Raises:
        SettingsError: the file cannot be used.
    """
    location = settings.response_store
    if location == "off":
        return None
    return ResponseStore(
        MEMORY if location == "memory" else location,
        max_bytes=settings.response_store_bytes,
        max_age_s=settings.response_store_hours * 3600.0,
        max_history_bytes=settings.max_body_bytes,
        is_shared=is_shared,
    )


def stop_with_parent(stop: asyncio.Event) -> None:
    """Sets the event when the parent process has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker has a parent"
    asyncio.get_running_loop().add_reader(parent.sentinel, stop.set)


async def _gauges(gateway: Gateway) -> Mapping[str, float]:
    return {
        "open_request_count": gateway.lifecycle.num_open,
        "live_generation_count": gateway.pool.num_live,
        "waiting_generation_count": gateway.pool.num_waiting,
    }


async def serve_with_workers(settings: GatewaySettings) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises:
        SettingsError: the port is taken, or the store cannot be used.
        EngineFailed: a worker ended by itself.
    """
    stop = stop_event()
    store = response_store(settings, is_shared=False)
    if store is not None:
        store.close()  # opening it marked responses that an earlier process left unfinished
    admin_port = settings.admin_port
    listen(settings.host, settings.port).close()  # fails if another program has the port
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
    collect_from_here()
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
        await _wait_any(stop, ended, asyncio.create_task(_activate(lifecycle, places)))
    finally:
        dead: list[BaseProcess] = []
        if not stop.is_set():  # a worker's pipe closes a little before its exit code is set
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


async def _wait_any(
    stop: asyncio.Event, ended: asyncio.Event, activation: asyncio.Task[None]
) -> None:
    waits = [asyncio.create_task(event.wait()) for event in (stop, ended)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in (*waits, activation):
        task.cancel()


async def _activate(lifecycle: Lifecycle, places: Sequence[WorkerPlace]) -> None:
    """Reports the gateway as serving once every worker serves."""
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


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        if condition() or time.monotonic() > deadline_s:
            return
        await asyncio.sleep(_POLL_S)
