"""`outrider learner`: trains running drafts on the answers of their targets."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

import torch
import uvloop
from prometheus_client import CollectorRegistry

from services.draft.learner.process import LearnerProcess
from services.draft.learner.settings import LearnerSettings
from shared.errors import OutriderError
from shared.hub import with_local_models
from shared.runtime.memory import refusing_shortage
from shared.settings import load_settings
from shared.signals import end_at_signals, stop_event
from shared.telemetry.logs import configure_logs
from shared.telemetry.metrics_server import serve_metrics


def main() -> None:
    """Learns until SIGINT or SIGTERM, or until `--max-lessons`."""
    end_at_signals()
    try:
        settings = read_settings(sys.argv[1:])
        configure_logs("learner", level=settings.log_level, log_format=settings.log_format)
        torch.set_num_threads(settings.num_threads)
        uvloop.run(_serve(settings))
    except OutriderError as error:
        sys.exit(f"outrider-learner: {error.message}")


def read_settings(arguments: Sequence[str]) -> LearnerSettings:
    """Reads flags and environment; fetches models that are named by their id on the Hub.

    Raises:
        SettingsError: names every bad setting.
    """
    return with_local_models(
        load_settings(LearnerSettings, service="learner", arguments=arguments, env=os.environ)
    )


async def _serve(settings: LearnerSettings) -> None:
    with refusing_shortage(
        lambda shortage: (
            f"no room for the learner on {settings.device}: {shortage}; give it another --device, "
            f"or lower --mem-fraction-static of the target that is there"
        )
    ):
        process = await asyncio.to_thread(LearnerProcess, settings)
    registry = CollectorRegistry()
    registry.register(process.metrics())
    host, tls = settings.maintenance_host, settings.server_tls
    serve_metrics(registry, host, settings.metrics_port, tls)
    await process.run(stop_event())


if __name__ == "__main__":
    main()
