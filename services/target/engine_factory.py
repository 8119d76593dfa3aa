"""Builds an engine from settings: weights, KV pool, CUDA graphs, scheduler, verifier, step loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.followers import Followers
from services.target.drafts.feature_store import captured_layers
from services.target.engine import Engine
from services.target.requests.request import ModelLimits
from services.target.rounds.round_shapes import MAX_ROWS
from services.target.scheduler import Scheduler, SchedulerLimits
from services.target.settings import NO_DRAFT, DraftNeeds, TargetSettings
from services.target.step_loop import StepLoop
from services.target.step_report import StepReport
from services.target.verifier import Verifier
from services.target.weight_stager import RankStages
from shared.errors import SettingsError, raise_problems
from shared.inbox import Inbox
from shared.kernels.linear import is_hopper
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.layers.linear import linears, num_saved_bytes
from shared.layers.tensor_group import TensorGroup
from shared.model_options import KvDtype, Quantisation
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.decoder import ROUTES, Decoder
from shared.models.kv_scales import kv_scales
from shared.models.loader import load_decoder
from shared.models.shard import Shard
from shared.runtime.device import device_named, dtype_named, kv_dtype_named, launch_on
from shared.runtime.graphs import (
    MAX_PROMPT_ROWS,
    ForwardGraphs,
    GraphLimits,
    graph_memory_bytes,
    step_memory_bytes,
)
from shared.runtime.lockstep import Leader
from shared.runtime.memory import (
    CacheSize,
    Shortage,
    fraction_in_force,
    free_memory_bytes,
    in_words,
    num_pages_for,
    refusing_shortage,
)
from shared.runtime.round_runner import RoundLimits
from shared.runtime.runner import ModelRunner
from shared.speculation.verify import Thresholds
from shared.telemetry.start_up import start_phase

logger = logging.getLogger(__name__)


def check_recurrent(settings: TargetSettings, config: ModelConfig) -> None:
    """Checks the flags for a model with linear attention, whose layers have recurrent states.

    Raises:
        SettingsError: has a line for each flag that such a model cannot be served with.
    """
    if config.delta is None:
        return
    problems = [*first_shard(settings).problems(config)]
    why = f"{config.architecture} has linear attention"
    if settings.kv_cache_dtype is KvDtype.FP8_E4M3:
        problems.append(f"--kv-cache-dtype is fp8_e4m3; {why}, whose inputs are not kept in 8 bits")
    raise_problems(problems)


def first_shard(settings: TargetSettings) -> Shard:
    """Returns the part of the model that rank 0 holds."""
    return Shard(
        size=settings.tp_size,
        spreads_experts=settings.ep_size > 1,
        spreads_sequences=settings.enable_dp_attention,
        num_stages=settings.pp_size,
    )


# Bytes of one logit, which is kept in half precision and three times in single precision.
_LOGIT_BYTES = 14
MOST_FULL_SEQUENCES = 16
"""A cache of default size holds at most so many times the running requests at full length. So a
small model on a large GPU leaves memory for the features that a remote draft reads."""
_MAX_ROUND_SHARE = 0.2
"""Largest share of the memory left by the weights that rounds get; it may limit their lanes."""


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner, and the figures that the engine's limits follow from.

    Attributes:
        max_context_tokens: longest prompt plus output.
    """

    runner: ModelRunner
    config: ModelConfig
    max_context_tokens: int


def build_runner(
    settings: TargetSettings,
    group: TensorGroup | None = None,
    leader: Leader | None = None,
    *,
    draft: DraftNeeds = NO_DRAFT,
) -> BuiltRunner:
    """Loads the model, allocates its KV pool and captures its graphs.

    Args:
        group: processes that share the model; all of them call this at the same time.
        leader: leader of the other ranks; None on them, and without a group.
        draft: needs of the draft that will be embedded in this process.

    Raises:
        CheckpointError: the model folder cannot be served.
        SettingsError: the device is missing, or cannot hold or compute what the settings ask for.
    """
    device = _opened_device(settings)
    config = ModelConfig.from_folder(settings.model_path)
    check_recurrent(settings, config)
    has_rounds = settings.has_device_rounds(is_cuda=device.type == "cuda")
    has_lanes = draft.has_lanes and has_rounds
    dtype = dtype_named(settings.dtype, config.dtype, device)
    is_first = leader is not None or group is None
    if group is not None:
        shard = first_shard(settings)
        group = group.spreading(experts=shard.spreads_experts, sequences=shard.spreads_sequences)
    with refusing_shortage(lambda shortage: _weights_message(settings, device, shortage)):
        decoder = load_decoder(
            settings.model_path,
            dtype=dtype,
            device=device,
            options=settings.model_options,
            show_progress=is_first,
            group=group,
        )
    feature_layers = draft.feature_layers
    if num_routes(settings, config):
        feature_layers = (*feature_layers, ROUTES)
    max_context = _context_tokens(settings, config)
    limits = _graph_limits(settings, decoder, max_context)
    # The draft is loaded after the cache is allocated. Ranks without a draft reserve as much, since
    # all ranks have the same number of pages.
    reserved_bytes = draft.weight_bytes
    if limits is not None:
        reserved_bytes += graph_memory_bytes(config, limits, dtype)
    if limits is not None and has_rounds:
        # For rounds with the embedded draft's head, or with drafts that attach later.
        share = int(_MAX_ROUND_SHARE * free_memory_bytes(device))
        reserved_bytes += min(round_memory_bytes(config), share)
    with start_phase("kv-pool") as phase:
        # The target keeps a hidden state of each token for an embedded draft, and others for remote
        # ones.
        num_states = int(bool(feature_layers)) + settings.remote_draft_features
        feature_bytes = num_states * config.hidden_size * dtype.itemsize
        pool, cache = _pool(settings, decoder, max_context, reserved_bytes, feature_bytes)
        phase.size_bytes = pool.storage.nbytes
    _warn_of_batch_variant_products(settings, decoder)
    saved_bytes = num_saved_bytes(decoder)
    logger.info(
        "%s in %s on %s%s; keys and values in %s",
        settings.model_id, dtype, device,
        f", 8-bit layers save {in_words(saved_bytes)}" if saved_bytes else "", pool.layout.dtype,
    )  # fmt: skip
    graphs = None
    if limits is not None:
        graphs = ForwardGraphs(decoder, pool, limits, cache)
        kept_layers = captured_layers(feature_layers, config.num_layers)
        _capture(graphs, kept_layers, cache, has_trees=not has_lanes, show_progress=is_first)
    runner = ModelRunner(decoder, pool, graphs, leader=leader, cache=cache)
    return BuiltRunner(runner, config, max_context)


def round_memory_bytes(config: ModelConfig) -> int:
    """Returns roughly the memory of the largest rounds besides weights and cache: the logits of the
    graphs, and the logits that tokens are drawn from."""
    return MAX_ROWS * config.vocab_size * _LOGIT_BYTES


def num_routes(settings: TargetSettings, config: ModelConfig) -> int:
    """Returns the number of experts recorded per token, over all layers; 0 if none are.

    Raises:
        SettingsError: experts are to be recorded, and the model has none.
    """
    if not settings.enable_return_routed_experts:
        return 0
    if config.experts is None:
        name = settings.model_id
        raise SettingsError((f"--enable-return-routed-experts: {name} has no experts",))
    return config.num_layers * config.experts.routing.num_chosen


def _opened_device(settings: TargetSettings) -> torch.device:
    """Returns the device, initialised for this thread, which takes a while for a GPU."""
    with start_phase("device"):
        device = device_named(settings.device)
        _check_device(settings, device)
        launch_on(device)
        torch.zeros(1, device=device).tolist()
    return device


def _context_tokens(settings: TargetSettings, config: ModelConfig) -> int:
    """Returns the longest sequence in tokens; at most the model's number of positions, with a
    warning if the setting is larger."""
    longest = config.max_position_embeddings
    if settings.context_length is not None and settings.context_length > longest:
        logger.warning(
            "--context-length is %s; the model has %s positions: sequences end there",
            *(f"{settings.context_length:,}", f"{longest:,}"),
        )
        return longest
    return settings.context_length or longest


def _check_device(settings: TargetSettings, device: torch.device) -> None:
    """Checks that a GPU has the instructions for 8-bit numbers and batch-invariant products, where
    flags ask for these.

    Raises:
        SettingsError: it does not have them.
    """
    if device.type != "cuda" or is_hopper(device):
        return
    flags = {
        f"--quantization {settings.quantization.value}": settings.quantization
        is not Quantisation.UNQUANT,
        f"--kv-cache-dtype {settings.kv_cache_dtype.value}": settings.kv_cache_dtype
        is KvDtype.FP8_E4M3,
        "--enable-deterministic-inference": settings.enable_deterministic_inference,
    }
    major, minor = torch.cuda.get_device_capability(device)
    raise_problems(
        f"{flag} needs a GPU of compute capability 9.0 or above; {device} has {major}.{minor}"
        for flag, is_set in flags.items()
        if is_set
    )


def _warn_of_batch_variant_products(settings: TargetSettings, decoder: Decoder) -> None:
    """Logs a warning if the rows of some products can have other bits in another batch."""
    if not settings.enable_deterministic_inference or decoder.device.type != "cuda":
        return
    weights = [layer.weight for layer in linears(decoder)]
    num_variant = sum(weight.operand_for(decoder.dtype) is None for weight in weights)
    if num_variant:
        logger.warning(
            "--enable-deterministic-inference: %d of %d products keep the library's kernels, whose "
            "bits depend on the batch; ours take half precision and depths that 128 divides",
            *(num_variant, len(weights)),
        )


def _pool(
    settings: TargetSettings,
    decoder: Decoder,
    max_context: int,
    reserved_bytes: int,
    feature_bytes: int,
) -> tuple[KvPool, CacheSize]:
    dtype = kv_dtype_named(settings.kv_cache_dtype, decoder.dtype)
    layout = decoder.kv_layout(settings.page_size, dtype)
    # Each running request has its own recurrent state.
    num_states = settings.max_running_requests
    if layout.states is not None:
        state_bytes = num_states * layout.states.size_bytes
        reserved_bytes += state_bytes
        logger.info("--max-running-requests %d: states take %s", num_states, in_words(state_bytes))
    shard = decoder.shard
    rank, num_ranks = (shard.rank, shard.size) if shard.spreads_sequences else (0, 1)
    # Rank 0 keeps the features for all ranks.
    token_bytes_elsewhere = num_ranks * feature_bytes
    free_bytes = free_memory_bytes(decoder.device)
    most_tokens = MOST_FULL_SEQUENCES * settings.max_running_requests * max_context
    num_pages = num_pages_for(
        layout,
        decoder.device,
        mem_fraction_static=settings.mem_fraction_static,
        max_total_tokens=settings.max_total_tokens,
        max_sequence_length=min(max_context, settings.max_total_tokens or max_context),
        reserved_bytes=reserved_bytes,
        step_bytes=step_memory_bytes(decoder),
        token_bytes_elsewhere=token_bytes_elsewhere,
        most_tokens=None if settings.mem_fraction_static else most_tokens,
        free_bytes=free_bytes,
    )
    if decoder.group is not None:
        # Only rank 0 leases pages, so all ranks must have the same number.
        num_pages = decoder.group.least(num_pages, decoder.device)
    fraction = fraction_in_force(settings.mem_fraction_static, decoder.device)
    if decoder.device.type == "cuda":  # a default share leaves room for a step
        page_bytes = layout.page_size_bytes + layout.page_size * token_bytes_elsewhere
        fraction = min(fraction, num_pages * page_bytes / (free_bytes - reserved_bytes))
    cache = CacheSize(num_pages * layout.page_size_bytes, fraction, settings.max_total_tokens)
    scales: Tensor | None = kv_scales(decoder) if layout.is_e4m3 else None
    with refusing_shortage(
        lambda shortage: f"no memory for the KV cache: {cache.advice(shortage)}"
    ):
        pool = KvPool(
            layout, num_pages, decoder.device, scales,
            num_states=num_states, rank=rank, num_ranks=num_ranks,
        )  # fmt: skip
        return pool, cache


def _weights_message(settings: TargetSettings, device: torch.device, shortage: Shortage) -> str:
    """Returns the error message for weights that do not fit. It gives the size of the files,
    because weights are read as they are stored, before any is rounded to 8 bits."""
    size = in_words(Checkpoint.open(settings.model_path).size_bytes)
    return (
        f"the weights of {settings.model_id}, {size} of files, do not fit {device}: {shortage}; "
        f"share them among more GPUs than --tp-size {settings.tp_size} and --pp-size "
        f"{settings.pp_size}, or take a device with more memory that is free"
    )


def _graph_limits(
    settings: TargetSettings, decoder: Decoder, max_context: int
) -> GraphLimits | None:
    if decoder.device.type != "cuda" or settings.disable_cuda_graph:
        return None
    return GraphLimits.of(
        max_sequences=settings.cuda_graph_max_bs,
        max_tree_nodes=settings.max_tree_nodes,
        max_context_tokens=max_context,
        max_prompt_rows=MAX_PROMPT_ROWS if decoder.plans_prompts_by_size else 0,
    )


def _capture(
    graphs: ForwardGraphs,
    capture_layers: tuple[int, ...],
    cache: CacheSize,
    *,
    has_trees: bool,
    show_progress: bool,
) -> None:
    """Captures every graph that the settings allow, so that none is captured under traffic."""
    advice = "no memory for CUDA graphs of {} rows: {}; or lower --cuda-graph-max-bs"
    with (
        start_phase("graphs"),
        refusing_shortage(
            lambda shortage: advice.format(graphs.limits.max_rows, cache.advice(shortage))
        ),
    ):
        graphs.capture(capture_layers, has_trees=has_trees, show_progress=show_progress)


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
    selection, is_cuda = None, built.runner.device.type == "cuda"
    if settings.has_pushed_rounds(is_cuda=is_cuda):
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
        maps_heads=settings.has_device_rounds(is_cuda=is_cuda),
    )
    engine = Engine(loop, Inbox(INBOX_CAPACITY))
    if followers is not None:
        stages = RankStages(followers.group, followers.leader, built.runner.device)
        engine.share_weights(stages)
    return engine
