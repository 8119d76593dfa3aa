"""`outrider-draft`: drafts token trees for the targets it dials."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import TYPE_CHECKING

from shared.garbage import collect_from_here, collect_none

if __name__ == "__main__":
    collect_none()  # while the rest is loaded

import uvloop
from prometheus_client import CollectorRegistry

from services.draft.drafter_factory import build_drafter, worker_identity
from services.draft.metrics import DraftRecorder
from services.draft.process import DraftProcess
from services.draft.settings import DraftSettings, read_settings
from shared.errors import OutriderError, end_process
from shared.signals import end_at_signals, stop_at_signals
from shared.telemetry.logs import configure_logs
from shared.telemetry.metrics_server import serve_metrics
from shared.telemetry.start_up import open_round_log
from shared.telemetry.tracing import tracer_for
from shared.telemetry.wire_meter import WireMeter, WireMetrics

if TYPE_CHECKING:
    from services.followers import Followers

# Longest time that a thread keeps the interpreter while another waits for it, for example to send
# trees. Python's default of 5 ms is longer than a round.
_SWITCH_INTERVAL_S = 0.0002


def main() -> None:
    """Runs the draft until SIGINT or SIGTERM."""
    end_at_signals()
    try:
        settings = read_settings(sys.argv[1:])
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        configure_logs("draft", level=settings.log_level, log_format=settings.log_format)
        if settings.algorithm.has_model:
            # A worker without a model runs where torch is not installed.
            import torch

            torch.set_num_threads(settings.num_threads)
        collect_from_here()
        uvloop.run(_serve(settings))
    except OutriderError as error:
        end_process("outrider-draft", error)


async def _serve(settings: DraftSettings) -> None:
    stop = asyncio.Event()
    tracer = tracer_for("draft", settings.otlp_endpoint, settings.trace_sample_ratio)
    round_log = open_round_log(settings.round_log)
    wire = WireMeter(round_log)
    process = DraftProcess(settings, DraftRecorder(tracer, round_log), wire)
    registry = CollectorRegistry()
    registry.register(process.metrics())
    registry.register(WireMetrics("outrider_draft", wire))
    followers = None
    try:
        serve_metrics(
            registry, settings.maintenance_host, settings.metrics_port, settings.server_tls
        )
        await process.listen()
        followers = await asyncio.to_thread(_followers, settings)
        drafter = await asyncio.to_thread(build_drafter, settings, None, followers)
        worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"
        identity = worker_identity(settings, drafter.limits, worker_id=worker_id)
        await process.serve(drafter, identity, lambda: stop_at_signals(stop))
        await process.run_until(stop)
    finally:
        has_ended = await process.stop()
        if followers is not None:
            followers.stop()
        tracer.close()
        if round_log is not None:
            round_log.close()
        if not has_ended:
            os._exit(0)  # nothing waits for the graphs that the engine's thread captures


def _followers(settings: DraftSettings) -> Followers | None:
    """Starts the other processes of a sharded model, if there are any."""
    if settings.tp_size == 1:
        return None
    # A worker without a model runs where torch is not installed.
    from services.draft.drafters.model_factory import start_followers

    return start_followers(settings)


if __name__ == "__main__":
    main()
