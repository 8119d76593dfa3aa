"""`outrider-target`: serves one model and verifies what drafts propose for it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress

import uvloop
from prometheus_client import CollectorRegistry, start_http_server

from services.target.engine_factory import build_engine
from services.target.metrics import TargetMetrics
from services.target.process import TargetProcess
from services.target.settings import TargetSettings
from shared.errors import OutriderError
from shared.settings import load_settings
from shared.telemetry.logs import configure_logs
from shared.tokenizer_files import tokenizer_sha256


def main() -> None:
    """Runs the target until SIGINT or SIGTERM."""
    try:
        settings = load_settings(
            TargetSettings, service="target", arguments=sys.argv[1:], env=os.environ
        )
        configure_logs("target", level=settings.log_level, log_format=settings.log_format)
        uvloop.run(_serve(settings))
    except OutriderError as error:
        sys.exit(f"outrider-target: {error.message}")


async def _serve(settings: TargetSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    registry = CollectorRegistry()
    metrics = TargetMetrics(registry)
    # Loading blocks the loop: there is nothing to serve yet.
    engine = build_engine(settings, metrics.observe_step)
    process = TargetProcess(engine, settings, tokenizer_sha256(settings.tokenizer_folder))
    if settings.metrics_port is not None:
        start_http_server(settings.metrics_port, settings.maintenance_host, registry)
    await process.start()
    try:
        await process.run_until(stop)
    finally:
        with suppress(asyncio.CancelledError):
            await process.stop(settings.drain_grace_s)


if __name__ == "__main__":
    main()
