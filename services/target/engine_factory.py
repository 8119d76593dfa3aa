"""Builds an engine from settings: weights, KV pool, policies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from services.target.engine import Engine
from services.target.inbox import Inbox
from services.target.request import ModelLimits
from services.target.scheduler import Scheduler, SchedulerLimits
from services.target.settings import TargetSettings
from services.target.step_report import StepReport
from services.target.verifier import Verifier
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.runtime.device import device_named, dtype_named
from shared.runtime.graph_inputs import GraphLimits
from shared.runtime.graphs import ForwardGraphs, graph_memory_bytes
from shared.runtime.memory import num_pages_for
from shared.runtime.runner import ModelRunner
from shared.speculation.verify import Thresholds

logger = logging.getLogger(__name__)
INBOX_CAPACITY = 65_536
"""Commands that may wait for the engine: far above any sane number of open requests."""


def build_engine(settings: TargetSettings, on_step: Callable[[StepReport], None]) -> Engine:
    """Loads the model and returns an engine, not started.

    Raises:
        CheckpointError: the model folder cannot be served.
        SettingsError: memory does not hold what the settings ask for.
    """
    device = device_named(settings.device)
    config = ModelConfig.from_folder(settings.model_path)
    dtype = dtype_named(settings.dtype, config.dtype, device)
    decoder = load_decoder(settings.model_path, dtype=dtype, device=device, show_progress=True)
    max_context = min(
        settings.context_length or config.max_position_embeddings, config.max_position_embeddings
    )
    layout = decoder.kv_layout(settings.page_size, dtype)
    limits = _graph_limits(settings, device, max_context)
    num_pages = num_pages_for(
        layout,
        device,
        mem_fraction_static=settings.mem_fraction_static,
        max_total_tokens=settings.max_total_tokens,
        max_sequence_length=min(max_context, settings.max_total_tokens or max_context),
        reserved_bytes=0 if limits is None else graph_memory_bytes(config, limits, dtype),
    )
    pool = KvPool(layout, num_pages, device)
    leases = KvLeases(num_pages, settings.page_size, prefix_cache=not settings.disable_radix_cache)
    logger.info(
        "%s in %s on %s; %s KV pages of %s tokens",
        settings.model_id, dtype, device, leases.num_pages, settings.page_size,
    )  # fmt: skip
    return Engine(
        runner=ModelRunner(decoder, pool, _graphs(decoder, pool, limits)),
        leases=leases,
        scheduler=Scheduler(leases, _scheduler_limits(settings)),
        verifier=_verifier(settings),
        limits=ModelLimits(
            vocab_size=config.vocab_size,
            max_context_tokens=max_context,
            max_kv_tokens=leases.num_pages * settings.page_size,
            eos_token_ids=config.eos_token_ids,
        ),
        inbox=Inbox(INBOX_CAPACITY),
        clock=time.monotonic,
        on_step=on_step,
    )


def _graph_limits(
    settings: TargetSettings, device: torch.device, max_context: int
) -> GraphLimits | None:
    if device.type != "cuda" or settings.disable_cuda_graph:
        return None
    return GraphLimits.of(
        max_sequences=settings.cuda_graph_max_bs,
        max_tree_nodes=settings.max_tree_nodes,
        max_context_tokens=max_context,
    )


def _graphs(decoder: Decoder, pool: KvPool, limits: GraphLimits | None) -> ForwardGraphs | None:
    if limits is None:
        return None
    graphs = ForwardGraphs(decoder, pool, limits)
    graphs.capture(show_progress=True)
    return graphs


def _scheduler_limits(settings: TargetSettings) -> SchedulerLimits:
    return SchedulerLimits(
        max_running=settings.max_running_requests,
        max_waiting=settings.max_queued_requests,
        max_step_rows=settings.chunked_prefill_size,
    )


def _verifier(settings: TargetSettings) -> Verifier:
    generator = torch.Generator()
    generator.seed()
    return Verifier(
        settings.verification_mode,
        generator=generator,
        thresholds=Thresholds(
            single=settings.speculative_accept_threshold_single,
            acc=settings.speculative_accept_threshold_acc,
        ),
    )
