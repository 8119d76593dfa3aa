"""One process of the gateway: what it is made of, and its life."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Mapping

from gateway.app import create_app
from gateway.http_server import HttpServer, listen
from gateway.maintenance_service import maintenance_server
from gateway.metrics import GatewayMetrics
from gateway.open_answers import OpenAnswers
from gateway.pool import PoolSettings, TargetPool
from gateway.quota import Quotas
from gateway.responses.store import MEMORY, ResponseStore, StoreLimits
from gateway.serving import Gateway
from gateway.settings import GatewaySettings
from gateway.text.model_text import ModelText
from gateway.worker_place import WorkerPlace
from shared.rpc.admin_service import AdminHooks, ProcessInfo
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.server import bind
from shared.settings import shown_settings
from shared.telemetry.tracing import tracer_for
from shared.tokenizer_files import tokenizer_sha256
from shared.version import package_version

_FLUSH_GRACE_S = 2  # for responses whose generation is over but whose bytes are not out


async def serve(settings: GatewaySettings, place: WorkerPlace | None = None) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        place: among the workers; None for the only process.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    gateway = _compose(settings, place)
    hooks = AdminHooks(drain=gateway.open_answers.wait_idle, gauges=lambda: _gauges(gateway))
    info = ProcessInfo("gateway", gateway.version, gateway.start_time_s, shown_settings(settings))
    maintenance = await maintenance_server(info, gateway.lifecycle, hooks)
    app, limits = create_app(gateway), settings.connection_limits
    http = HttpServer(
        app,
        listen(settings.host, settings.port, is_shared=place is not None),
        settings.http_tls,
        limits,
    )
    servers = [http]
    if place is None:
        address = f"{settings.maintenance_host}:{settings.admin_port}"
        bind(maintenance, address, settings.server_tls)
    else:
        bind(maintenance, place.maintenance_address)
        servers.append(HttpServer(app, place.http_path, limits=limits))
        stop_with_parent(stop)
    await maintenance.start()
    gateway.pool.start()
    for server in servers:
        server.start()
    await gateway.lifecycle.activate()
    try:
        await http.run_until(stop)
    finally:
        await gateway.lifecycle.drain()
        await gateway.open_answers.wait_idle(settings.drain_grace_s)
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
    pool = TargetPool(
        PoolSettings(
            addresses=settings.target,
            tokenizer_sha256=tokenizer_sha256(settings.tokenizer),
            model_name=settings.model_name,
            aliases=settings.model_alias,
            retry_window_s=settings.retry_window_s,
            tls=settings.target_tls,
        )
    )
    quotas = Quotas(settings.api_keys, settings.key_limits, never_learnt=settings.never_learn_from)
    return Gateway(
        pool=pool,
        text=ModelText.read(
            settings.tokenizer,
            settings.max_prompt_characters,
            tools=settings.tool_call_parser,
            reasoning=settings.reasoning_parser,
        ),
        limits=settings.limits,
        metrics=GatewayMetrics(pool, quotas),
        lifecycle=Lifecycle([]),
        open_answers=OpenAnswers(),
        version=package_version(),
        start_time_s=time.time(),
        quotas=quotas,
        cors_origins=settings.cors_origin,
        place=place,
        response_store=response_store(settings, is_shared=place is not None),
        target_maintenance=settings.maintenance_addresses,
        remote_operators=settings.remote_operators,
        target_tls=settings.target_tls,
        tracer=tracer_for("gateway", settings.otlp_endpoint, settings.trace_sample_ratio),
    )


def response_store(settings: GatewaySettings, *, is_shared: bool) -> ResponseStore | None:
    """Returns the store that the settings ask for.

    Args:
        is_shared: other workers have it open; what runs in them goes on.

    Raises:
    SettingsError: the file cannot be used.
    """
    where = settings.response_store
    if where == "off":
        return None
    limits = StoreLimits(
        settings.response_store_bytes,
        settings.response_store_hours * 3600.0,
        settings.max_body_bytes,
    )
    return ResponseStore(MEMORY if where == "memory" else where, limits, is_shared=is_shared)


def stop_on_signals(stop: asyncio.Event) -> None:
    """Sets the event at SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def stop_with_parent(stop: asyncio.Event) -> None:
    """Sets the event when the process that started this one is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker has one"
    asyncio.get_running_loop().add_reader(parent.sentinel, stop.set)


async def _gauges(gateway: Gateway) -> Mapping[str, float]:
    return {
        "open_request_count": gateway.open_answers.num_open,
        "live_generation_count": gateway.pool.num_live,
        "waiting_generation_count": gateway.pool.num_waiting,
    }
