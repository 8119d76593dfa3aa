"""`outrider-gateway`: OpenAI's HTTP interface in front of one or more targets."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

import uvloop

from gateway.app import create_app
from gateway.http_server import HttpServer
from gateway.maintenance_service import maintenance_server
from gateway.metrics import GatewayMetrics
from gateway.open_answers import OpenAnswers
from gateway.pool import PoolSettings, TargetPool
from gateway.quota import Quotas
from gateway.responses.store import MEMORY, ResponseStore, StoreLimits
from gateway.serving import Gateway
from gateway.settings import GatewaySettings
from gateway.text.model_text import ModelText
from shared.errors import OutriderError
from shared.hub import local_path
from shared.rpc.admin_service import AdminHooks, ProcessInfo
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.server import bind
from shared.settings import load_settings, shown_settings
from shared.telemetry.logs import configure_logs
from shared.telemetry.tracing import tracer_for
from shared.tokenizer_files import tokenizer_sha256
from shared.version import package_version

_FLUSH_GRACE_S = 2  # for responses whose generation is over but whose bytes are not out


def main() -> None:
    """Runs the gateway until SIGINT or SIGTERM."""
    try:
        settings = load_settings(
            GatewaySettings, service="gateway", arguments=sys.argv[1:], env=os.environ
        )
        folder = local_path(settings.tokenizer, flag="--tokenizer")
        settings = replace(settings, tokenizer=folder)
        configure_logs("gateway", level=settings.log_level, log_format=settings.log_format)
        uvloop.run(_serve(settings))
    except OutriderError as error:
        sys.exit(f"outrider-gateway: {error.message}")


async def _serve(settings: GatewaySettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    gateway = _compose(settings)
    hooks = AdminHooks(drain=gateway.open_answers.wait_idle, gauges=lambda: _gauges(gateway))
    info = ProcessInfo("gateway", gateway.version, gateway.start_time_s, shown_settings(settings))
    maintenance = await maintenance_server(info, gateway.lifecycle, hooks)
    bind(maintenance, f"{settings.maintenance_host}:{settings.admin_port}", settings.server_tls)
    http = HttpServer(
        create_app(gateway),
        settings.host,
        settings.port,
        settings.http_tls,
        settings.connection_limits,
    )
    await maintenance.start()
    gateway.pool.start()
    http.start()
    await gateway.lifecycle.activate()
    try:
        await http.run_until(stop)
    finally:
        await gateway.lifecycle.drain()
        await gateway.open_answers.wait_idle(settings.drain_grace_s)
        await http.stop(_FLUSH_GRACE_S)
        await gateway.pool.close()
        await maintenance.stop(0.0)
        if gateway.response_store is not None:
            gateway.response_store.close()
        gateway.tracer.close()


def _compose(settings: GatewaySettings) -> Gateway:
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
        response_store=_response_store(settings),
        target_maintenance=settings.maintenance_addresses,
        remote_operators=settings.remote_operators,
        target_tls=settings.target_tls,
        tracer=tracer_for("gateway", settings.otlp_endpoint, settings.trace_sample_ratio),
    )


def _response_store(settings: GatewaySettings) -> ResponseStore | None:
    """Raises:
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
    return ResponseStore(MEMORY if where == "memory" else where, limits)


async def _gauges(gateway: Gateway) -> Mapping[str, float]:
    return {
        "open_request_count": gateway.open_answers.num_open,
        "live_generation_count": gateway.pool.num_live,
        "waiting_generation_count": gateway.pool.num_waiting,
    }


if __name__ == "__main__":
    main()
