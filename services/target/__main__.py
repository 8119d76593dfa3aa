"""`outrider-target`: serves one model and verifies the candidate trees of drafts."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from shared.garbage import collect_from_here, collect_none

if __name__ == "__main__":
    collect_none()  # no garbage collection during the imports

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
from shared.errors import OutriderError, end_process
from shared.model_files import tokenizer_sha256
from shared.settings import load_settings, split_arguments
from shared.signals import end_at_signals, stop_at_signals
from shared.telemetry.logs import configure_logs
from shared.telemetry.metrics_server import serve_metrics
from shared.telemetry.start_up import IMPORTS, SERVING, log_process_age, open_round_log, start_phase
from shared.telemetry.tracing import tracer_for
from shared.telemetry.vllm_metrics import VllmMetrics
from shared.telemetry.wire_meter import WireMeter, WireMetrics

# Weight updates are gathered in pinned memory. One thread takes 14 s to pin 16 GB.
_PINNED_BY_THREADS = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
# How long a busy event loop may hold the GIL before the engine thread gets it and can launch. The
# default of Python, 5 ms, is longer than a step.
_SWITCH_INTERVAL_S = 0.0005


def main() -> None:
    """Runs the target until SIGINT or SIGTERM; on a host other than the first, its ranks."""
    end_at_signals()
    tune_torch()
    tune_interpreter()
    try:
        settings, draft_settings = read_settings(sys.argv[1:], os.environ)
        configure_logs("target", level=settings.log_level, log_format=settings.log_format)
        log_process_age(IMPORTS)
        # It holds for the whole process, so the setting of an embedded draft has no effect.
        torch.set_num_threads(settings.num_threads)
        if settings.node_rank > 0:
            run_followers(settings, draft_needs(settings, draft_settings))
        else:
            uvloop.run(_serve(settings, draft_settings))
    except OutriderError as error:
        end_process("outrider-target", error)


def tune_torch() -> None:
    """Sets environment variables that torch reads when it first uses a GPU."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", _PINNED_BY_THREADS)


def tune_interpreter() -> None:
    """Keeps garbage collection and the GIL from delaying steps; call it after the imports."""
    collect_from_here()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def read_settings(
    arguments: Sequence[str], env: Mapping[str, str]
) -> tuple[TargetSettings, DraftSettings | None]:
    """Returns the settings of the target and of its embedded draft, if any.

    Flags that the target lacks are the embedded draft's. Models named by a Hub id are downloaded.

    Raises:
        SettingsError: names every bad setting, such as flags that neither of them has.
    """
    target_arguments, draft_arguments = split_arguments(TargetSettings, arguments)
    settings = load_settings(TargetSettings, service="target", arguments=target_arguments, env=env)
    if settings.draft is DraftPlacement.EMBEDDED:
        settings = with_local_model(settings)
        return settings, embedded_settings(settings, draft_arguments, env)
    settings = load_settings(TargetSettings, service="target", arguments=arguments, env=env)
    return with_local_model(settings), None


async def _serve(settings: TargetSettings, draft_settings: DraftSettings | None) -> None:
    stop = asyncio.Event()
    with ExitStack() as opened:
        process = _build(settings, draft_settings, opened)
        try:
            await process.start(lambda: stop_at_signals(stop))
            log_process_age(SERVING)
            await process.run_until(stop)
        finally:
            with suppress(asyncio.CancelledError):
                await process.stop(settings.drain_grace_s)


def _build(
    settings: TargetSettings, draft_settings: DraftSettings | None, opened: ExitStack
) -> TargetProcess:
    """Loads the model and builds the process. `opened` gets every resource that must be closed,
    also after an error. This blocks the event loop, which has nothing to serve yet."""
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
    """Starts the other ranks of the model, if there are any. They wait for calls of this process,
    and this process waits for them before it ends, so `opened` stops them."""
    if settings.ranks.size == 1:
        return None
    with start_phase("followers"):
        followers = start_followers(settings, draft)
    opened.callback(followers.stop)
    return followers


if __name__ == "__main__":
    main()
