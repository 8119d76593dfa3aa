"""Builds an engine from settings: runner, KV leases, scheduler, verifier and step loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from services.followers import Followers
from services.target.engine import Engine
from services.target.requests.request import ModelLimits
from services.target.runner_factory import build_runner, num_routes
from services.target.scheduler import Scheduler, SchedulerLimits
from services.target.settings import NO_DRAFT, DraftNeeds, TargetSettings
from services.target.step_loop import StepLoop
from services.target.step_report import StepReport
from services.target.verifier import Verifier
from services.target.weight_stager import RankStages
from shared.inbox import Inbox
from shared.kv.leases import KvLeases
from shared.runtime.round_runner import RoundLimits
from shared.speculation.verify import Thresholds

logger = logging.getLogger(__name__)
INBOX_CAPACITY = 65_536
"""Most commands that wait for the engine: far above any reasonable number of open requests."""


def build_engine(
    settings: TargetSettings,
    on_step: Callable[[StepReport], None],
    followers: Followers | None = None,
    draft: DraftNeeds = NO_DRAFT,
) -> Engine:
    """Loads the model and returns an engine, not started.

    Args:
        followers: the other ranks of the model; None: this process holds the whole model.
        draft: needs of the draft that will be embedded in this process.

    Raises:
        CheckpointError: the model folder cannot be served.
        SettingsError: the device is missing, or cannot hold or compute what the settings ask for.
    """
    ranks = () if followers is None else (followers.group, followers.leader)
    built = build_runner(settings, *ranks, draft=draft)
    leases = KvLeases(
        built.runner.pool.num_leased_pages,
        settings.page_size,
        prefix_cache=not settings.disable_radix_cache,
        num_groups=built.runner.pool.num_ranks,
    )
    logger.info("%s KV pages of %s tokens", leases.num_pages, settings.page_size)
    limits = ModelLimits(
        vocab_size=built.config.vocab_size,
        max_context_tokens=built.max_context_tokens,
        max_kv_tokens=leases.num_group_pages * settings.page_size,
        eos_token_ids=built.config.eos_token_ids,
        num_routes=num_routes(settings, built.config),
    )
    selection = None  # limits of device rounds with trees that remote drafts push
    if settings.has_device_rounds(is_cuda=built.runner.device.type == "cuda"):
        max_sequences = min(settings.max_running_requests, settings.cuda_graph_max_bs)
        selection = RoundLimits(max_sequences, limits.max_sequence_tokens)
    generator = torch.Generator()
    generator.seed()
    loop = StepLoop(
        runner=built.runner,
        leases=leases,
        scheduler=Scheduler(
            leases,
            SchedulerLimits(
                max_running=settings.max_running_requests,
                max_waiting=settings.max_queued_requests,
                max_step_rows=settings.chunked_prefill_size,
            ),
        ),
        verifier=Verifier(
            settings.verification,
            generator=generator,
            thresholds=Thresholds(
                single=settings.speculative_accept_threshold_single,
                acc=settings.speculative_accept_threshold_acc,
            ),
        ),
        limits=limits,
        clock=time.monotonic,
        on_step=on_step,
        overlaps=not settings.disable_overlap_schedule,
        always_up_to=settings.candidate_wait_sequences,
        adaptive=settings.adaptive,
        selection=selection,
    )
    engine = Engine(loop, Inbox(INBOX_CAPACITY))
    if followers is not None:
        stages = RankStages(followers.group, followers.leader, built.runner.device)
        engine.share_weights(stages)
    return engine
