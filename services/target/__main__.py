"""`outrider-target`: serves one model and verifies what drafts propose for it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from shared.garbage import collect_from_here, collect_none

if __name__ == "__main__":
    collect_none()  # while the rest is loaded

import torch
import uvloop
from prometheus_client import CollectorRegistry

from services.draft.settings import DraftSettings
from services.embedded import build_embedded_draft
from services.embedded_settings import draft_needs, embedded_settings
from services.followers import Followers
from services.target.engine_factory import build_engine
from services.target.metrics import TargetMetrics, WantedMetrics, answer, engine_figures
from services.target.process import TargetProcess
from services.target.settings import DraftNeeds, DraftPlacement, TargetSettings, with_local_model
from services.target.tensor_parallel import run_followers, start_followers
from shared.errors import OutriderError
from shared.model_files import tokenizer_sha256
from shared.settings import load_settings, split_arguments
from shared.telemetry.logs import configure_logs
from shared.telemetry.metrics_server import serve_metrics
from shared.telemetry.start_up import IMPORTS, SERVING, log_process_age, open_round_log, start_phase
from shared.telemetry.tracing import tracer_for
from shared.telemetry.vllm_metrics import VllmMetrics
from shared.telemetry.wire_meter import WireMeter, WireMetrics

# An update of the weights is gathered in pinned memory. One thread takes 14 s to pin 16 GB.
_PINNED_BY_THREADS = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
# How long a busy event loop may keep the interpreter from the engine's thread, which then launches
# late: Python's own 5 ms are longer than a step.
_SWITCH_INTERVAL_S = 0.0005


def main() -> None:
    """Runs the target until SIGINT or SIGTERM, or what another host has of it."""
    tune_torch()
    tune_interpreter()
    try:
        settings, draft_settings = read_settings(sys.argv[1:], os.environ)
        configure_logs("target", level=settings.log_level, log_format=settings.log_format)
        log_process_age(IMPORTS)
        # Of the process, so a draft it hosts has no say.
        torch.set_num_threads(settings.num_threads)
        if settings.node_rank > 0:
            run_followers(settings, draft_needs(settings, draft_settings))
        else:
            uvloop.run(_serve(settings, draft_settings))
    except OutriderError as error:
        sys.exit(f"outrider-target: {error.message}")


def tune_torch() -> None:
    """Sets what torch reads from the environment when it first uses a GPU."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", _PINNED_BY_THREADS)


def tune_interpreter() -> None:
    """Has Python hold up no step; once everything is imported."""
    collect_from_here()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def read_settings(
    arguments: Sequence[str], env: Mapping[str, str]
) -> tuple[TargetSettings, DraftSettings | None]:
    """Returns the target's settings and those of the draft it hosts, if any.

    Raises:
        SettingsError: names every bad setting. Flags that are not the target's are the draft's,
            or bad when none is hosted. A model that is named by its id on the Hub is fetched.
    """
    own, others = split_arguments(TargetSettings, arguments)
    settings = load_settings(TargetSettings, service="target", arguments=own, env=env)
    if settings.draft is DraftPlacement.EMBEDDED:
        settings = with_local_model(settings)
        return settings, embedded_settings(settings, others, env)
    settings = load_settings(TargetSettings, service="target", arguments=arguments, env=env)
    return with_local_model(settings), None


async def _serve(settings: TargetSettings, draft_settings: DraftSettings | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with ExitStack() as opened:
        process = _build(settings, draft_settings, opened)
        try:
            await process.start()
            log_process_age(SERVING)
            await process.run_until(stop)
        finally:
            with suppress(asyncio.CancelledError):
                await process.stop(settings.drain_grace_s)


def _build(
    settings: TargetSettings, draft_settings: DraftSettings | None, opened: ExitStack
) -> TargetProcess:
    """Loads everything, and puts on `opened` what has to be closed at the end, however it comes.
    That blocks the loop: there is nothing to serve yet."""
    registry = CollectorRegistry()
    round_log = open_round_log(settings.round_log)
    if round_log is not None:
        opened.callback(round_log.close)
    tracer = tracer_for("target", settings.otlp_endpoint, settings.trace_sample_ratio)
    opened.callback(tracer.close)
    wire = WireMeter(round_log)
    metrics = TargetMetrics(registry, round_log)
    registry.register(WireMetrics("outrider_target", wire))
    needs = draft_needs(settings, draft_settings)
    followers = _followers(settings, needs, opened)
    engine = build_engine(settings, metrics.observe_step, followers, needs)
    requests = VllmMetrics(lambda: engine_figures(engine, settings, metrics.num_preempted))
    registry.register(requests)
    registry.register(WantedMetrics(lambda: answer(engine.attachments) or ()))
    process = TargetProcess(
        engine,
        settings,
        tokenizer_sha256(settings.tokenizer_folder),
        metrics=requests,
        tracer=tracer,
        wire=wire,
    )
    if draft_settings is not None:
        with start_phase("draft"):
            draft = build_embedded_draft(engine, settings, draft_settings, tracer)
        registry.register(draft.metrics)
        process.embed(draft.port, draft.settings)
    serve_metrics(registry, settings.maintenance_host, settings.metrics_port, settings.server_tls)
    return process


def _followers(settings: TargetSettings, draft: DraftNeeds, opened: ExitStack) -> Followers | None:
    """Starts the other processes of the model, if there are any. They wait for this one, which
    waits for them before it ends, so something has to end them."""
    if settings.ranks.size == 1:
        return None
    with start_phase("followers"):
        followers = start_followers(settings, draft)
    opened.callback(followers.stop)
    return followers


if __name__ == "__main__":
    main()
