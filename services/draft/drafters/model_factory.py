"""Loads a drafter's model and the tensors borrowed from its target; allocates its KV pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from services.draft.algorithm import Algorithm
from services.draft.drafter_factory import check_no_states, outcome_budget, target_vocabulary
from services.draft.drafters.contexts import CONTEXT_MARGIN
from services.draft.drafters.dflash import DflashDrafter
from services.draft.drafters.drafter import Drafter
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.settings import DraftSettings
from services.draft.settings_problems import block_problems
from services.followers import Followers, Seat, check_shard, rank_devices
from services.ranks import Ranks
from shared.errors import CheckpointError, SettingsError, raise_problems
from shared.kernels.linear import keeps_row_bits
from shared.kernels.quantised import QuantisedWeight
from shared.kv.leases import KvLeases
from shared.kv.pool import KvLayout, KvPool
from shared.layers.linear import num_saved_bytes
from shared.layers.tensor_group import TensorGroup
from shared.model_files import num_ids
from shared.model_options import AttentionBackend, ModelOptions, Quantisation
from shared.models.config import ModelConfig
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.models.decoder import Decoder
from shared.models.heads.config import HeadConfig, HeadKind
from shared.models.heads.dflash import DflashConfig, load_dflash
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.head import DraftHead
from shared.models.heads.loader import load_head, read_token_map
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetTensors, target_tensors
from shared.models.loader import load_decoder
from shared.models.scaled_weights import QUANTIZATION_CONFIG
from shared.models.shard import Shard
from shared.runtime.device import device_named, dtype_named, launch_on
from shared.runtime.followers import TreeFollower
from shared.runtime.graphs import GraphLimits, graph_memory_bytes
from shared.runtime.lockstep import Leader, TreeLeader, follow
from shared.runtime.memory import CacheSize, Shortage, free_memory_bytes, num_pages_for
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import DecoderModel, HeadModel
from shared.runtime.tree_pass import PassLimits, head_memory_bytes, num_pass_rows

log = logging.getLogger(__name__)


def device_for(settings: DraftSettings) -> torch.device:
    """Returns the device, and makes this thread launch kernels on it.

    Raises:
        SettingsError: other settings need CUDA, and the device has none.
    """
    device = device_named(settings.device)
    if device.type == "cuda":
        launch_on(device)
        return device
    problems = []
    if settings.speculative_draft_attention_backend is AttentionBackend.TRITON:
        problems.append("--speculative-draft-attention-backend: triton needs CUDA")
    if settings.enable_cuda_graph:
        problems.append("--enable-cuda-graph needs CUDA")
    raise_problems(f"{problem}; the device is {device}" for problem in problems)
    return device


def draft_options(
    settings: DraftSettings,
    config: HeadConfig | ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> ModelOptions:
    """Returns how to load a draft model or a draft head.

    A dense one in 16 bits is loaded in FP8 where the device has kernels for it, unless the settings
    name a quantisation: it reads half the bytes, and an inexact draft never changes a token.
    """
    options, folder = settings.model_options, settings.model_folder
    depths: tuple[int, ...] = ()
    if isinstance(config, HeadConfig):
        depths, config = (config.target_hidden_size,), config.sizes
    is_set = settings.speculative_draft_model_quantization is not None
    is_quantised = QUANTIZATION_CONFIG in ConfigFile.read(folder / CONFIG_FILE)
    if is_set or is_quantised or config.experts is not None:
        return options
    # Columns of the weight matrices. Each process of a sharded model has a part of the latter two.
    cut = config.num_heads * config.head_dim, config.intermediate_size
    depths += config.hidden_size, *(depth // settings.tp_size for depth in cut)
    if all(keeps_row_bits(device, dtype, depth) for depth in depths):
        return replace(options, quantisation=Quantisation.FP8)
    return options


def log_quantisation(model: object) -> None:
    """Logs the memory that 8-bit weights save, if there are any."""
    size_bytes = num_saved_bytes(model)
    if isinstance(model, Decoder) and isinstance(model.lm_head.weight, QuantisedWeight):
        # A tied embedding stays in memory beside the lm_head.
        size_bytes -= model.embedding.nbytes if model.config.tie_word_embeddings else 0
    if size_bytes:
        log.info("8-bit layers save %.1f MiB", size_bytes / 2**20)


def context_for(settings: DraftSettings, longest: int, *, margin_tokens: int) -> int:
    """Returns the tokens a forward can attend to: `--context-length`, or all positions of the
    checkpoint. A larger `--context-length` is cut to these, with a warning.

    Args:
        longest: number of positions of the checkpoint.
        margin_tokens: tokens of the context that a tree needs; a window size does not count them.

    Raises:
        CheckpointError: no room is left for a context beside a tree.
    """
    length = settings.context_length or longest
    if length > longest:
        log.warning(
            "--context-length is %d; the draft's checkpoint has positions for %d, which are taken",
            *(length, longest),
        )
    context = min(length, longest, settings.max_total_tokens or longest)
    if settings.speculative_draft_window_size is not None:
        context = min(context, settings.speculative_draft_window_size + margin_tokens)
    if context < 2 * margin_tokens:
        raise CheckpointError(
            f"the draft's context is {context} tokens; trees need {margin_tokens} of it, so at "
            f"least {2 * margin_tokens} are needed"
        )
    return context


def is_cut_short(context: int, target_tokens: int) -> bool:
    """Whether a head's context is shorter than its target's longest sequence; logs a warning then.

    Args:
        target_tokens: the target's context.
    """
    if context >= target_tokens:
        return False
    log.warning(
        "the draft's context is %d tokens, the target's %d: longer sequences are drafted from "
        "their last tokens",
        *(context, target_tokens),
    )
    return True


def allocate_kv(
    settings: DraftSettings,
    layout: KvLayout,
    device: torch.device,
    *,
    max_context_tokens: int,
    reserved_bytes: int = 0,
    most_tokens: int | None = None,
    group: TensorGroup | None = None,
) -> tuple[KvPool, KvLeases]:
    """Allocates the KV pool; call it once the weights are loaded.

    Args:
        reserved_bytes: memory to leave free for other uses.
        most_tokens: see `num_pages_for`.
        group: processes that hold a part of each page; all of them call this at the same time.

    Raises:
        SettingsError: memory does not hold what the settings ask for.
    """
    num_pages = num_pages_for(
        layout,
        device,
        mem_fraction_static=settings.mem_fraction_static,
        max_total_tokens=settings.max_total_tokens,
        max_sequence_length=min(
            max_context_tokens, settings.max_total_tokens or max_context_tokens
        ),
        reserved_bytes=reserved_bytes,
        most_tokens=most_tokens,
    )
    if group is not None:
        # Rank 0 leases pages for all ranks, so all must have as many.
        num_pages = group.least(num_pages, device)
    leases = KvLeases(num_pages, settings.page_size, prefix_cache=not settings.disable_radix_cache)
    log.info("%s KV pages of %d tokens", f"{leases.num_pages:,}", settings.page_size)
    return KvPool(layout, num_pages, device), leases


@dataclass(frozen=True, slots=True)
class Host:
    """The target in whose process a drafter runs, as far as the drafter's memory depends on it.

    Attributes:
        decoder: the target's decoder, whose tensors a head uses; None where they are read from the
            target's folder.
        num_tokens: tokens in the target's KV cache; None where the target is in another process.
        cache: the target's KV cache, which takes memory that the drafter may lack; None where the
            target is in another process.
        round_bytes: GPU memory that the target's rounds with the drafter's model need.
        vocab_size: the target's vocabulary size; 0 where the target is in another process.
    """

    decoder: Decoder | None = None
    num_tokens: int | None = None
    cache: CacheSize | None = None
    round_bytes: int = 0
    vocab_size: int = 0

    def reserved_bytes(
        self, device: torch.device, own_bytes: int, spec: FeatureSpec | None = None
    ) -> int:
        """Returns the bytes that a drafter's cache leaves free: for its own passes, for the
        features it reads, and for the target's rounds. Rounds get at most half of the memory that
        is free beside the other two.

        Args:
            own_bytes: bytes of the drafter's own passes.
            spec: None for a drafter that reads no features.
        """
        reserved = own_bytes + (0 if spec is None else self.feature_bytes(spec))
        if not self.round_bytes:
            return reserved
        return reserved + min(self.round_bytes, max(0, free_memory_bytes(device) - reserved) // 2)

    @property
    def most_tokens(self) -> int | None:
        """Most tokens that a head's cache can use: as many as the target's cache has, and as many
        again for rounds on the device, which get half of the pages."""
        return None if self.num_tokens is None else 2 * self.num_tokens

    def no_memory(self, shortage: Shortage) -> str:
        """Returns the error message that the drafter does not fit, and what to lower."""
        if self.cache is not None:
            return f"the draft does not fit beside its target: {self.cache.advice(shortage)}"
        return (
            f"the draft does not fit its device: {shortage}; lower its --mem-fraction-static or "
            f"--max-running-requests, or the --mem-fraction-static of a target on the same device"
        )

    def feature_bytes(self, spec: FeatureSpec) -> int:
        """Returns the memory of the target's features: it keeps a row for each token of its cache,
        and allocates them once the head is attached."""
        return (self.num_tokens or 0) * spec.width * spec.dtype.itemsize


# The sizes and the memory of passes that grow whole trees.


def pass_limits(
    settings: DraftSettings, device: torch.device, *, max_context_tokens: int
) -> PassLimits:
    """Returns the sizes of passes."""
    # The plain torch kernels read sizes from the device, which a graph cannot capture.
    has_kernels = settings.speculative_draft_attention_backend is not AttentionBackend.TORCH
    return PassLimits(
        max_sequences=settings.max_running_requests,
        max_context_tokens=max_context_tokens,
        has_graphs=device.type == "cuda"
        and has_kernels
        and settings.enable_cuda_graph is not False,
    )


def reserved_for_passes(
    settings: DraftSettings, limits: PassLimits, largest_bytes: Callable[[], int]
) -> int:
    """Returns the bytes that the cache must leave free for passes, by those of the largest graph.
    Passes that draft ahead have a grower with memory of its own."""
    if not limits.has_graphs:
        return 0
    return (2 if outcome_budget(settings) else 1) * largest_bytes()


def build_model_drafter(
    settings: DraftSettings, host: Host, followers: Followers | None
) -> Drafter:
    """Returns the drafter with weights loaded; see `build_drafter`."""
    if settings.algorithm is Algorithm.DFLASH:
        return build_dflash(settings, host)
    if settings.algorithm.reads_features:
        return build_head(settings, host)
    group, leader = (None, None) if followers is None else (followers.group, followers.leader)
    built = build_model(settings, group, leader, host)
    return StandaloneDrafter(
        built.runner, built.leases, built.grower, max_context_tokens=built.max_context_tokens
    )


# Heads.


def build_head(settings: DraftSettings, host: Host) -> EagleDrafter:
    """Returns the drafter of an EAGLE or EAGLE3 head, or of next-token layers.

    Raises:
        CheckpointError: a folder cannot be served, or the head was made for another target.
        SettingsError: memory does not hold what the settings ask for.
    """
    folder, algorithm = settings.model_folder, settings.algorithm
    target = ModelConfig.from_folder(settings.target_folder)
    config = head_config(algorithm, folder, target)
    device = device_for(settings)
    dtype = dtype_named(settings.dtype, config.dtype, device)
    tensors = target_tensors(settings.target_folder, host.decoder, dtype=dtype, device=device)
    context = context_for(settings, config.max_position_embeddings, margin_tokens=CONTEXT_MARGIN)
    is_shorter = is_cut_short(context, target.max_position_embeddings)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    options["options"] = draft_options(settings, config, dtype, device)
    if algorithm is not Algorithm.MTP:
        options["token_map"] = _token_map(settings, target.vocab_size)
    head = read_head(algorithm, folder, tensors, **options)
    log.info(
        "%s in %s on %s: %d layers, %d of %d tokens, features of layers %s, %d wide",
        *(folder.name, head.dtype, head.device, len(head.layers)),
        *(head.vocabulary.size, head.config.vocab_size),
        *(list(head.feature_spec.layer_indices), head.feature_spec.width),
    )
    log_quantisation(head)
    has_one_layer = len(head.layers) == 1
    limits = pass_limits(settings, device, max_context_tokens=context)
    # A head of several layers does not grow whole trees in one pass, and has no prefix cache.
    reserved = 0
    if has_one_layer:
        reserved = reserved_for_passes(
            settings, limits, lambda: head_memory_bytes(head, settings.shape, limits)
        )
    pool, leases = allocate_kv(
        settings if has_one_layer else replace(settings, disable_radix_cache=True),
        head.kv_layout(settings.page_size, dtype),
        device,
        max_context_tokens=context,
        reserved_bytes=host.reserved_bytes(device, reserved, head.feature_spec),
        most_tokens=host.most_tokens,
    )
    model = HeadModel(head, pool)
    if not has_one_layer:
        return MultiLayerDrafter(
            model, leases, max_context_tokens=context, keeps_features=is_shorter
        )
    return EagleDrafter(
        model,
        leases,
        max_context_tokens=context,
        keeps_features=is_shorter,
        grower=TreeGrower(model, limits),
    )


def head_config(
    algorithm: Algorithm, folder: Path, target: ModelConfig
) -> HeadConfig | ModelConfig:
    """Returns the config of an EAGLE or EAGLE3 head, or of next-token layers."""
    if algorithm is Algorithm.MTP:
        return ModelConfig.from_folder(folder)
    return HeadConfig.from_folder(folder, HeadKind(algorithm.value), target)


def read_head(
    algorithm: Algorithm, folder: Path, tensors: TargetTensors, **options: Any
) -> DraftHead:
    """Loads an EAGLE or EAGLE3 head, or next-token layers. Options: see `load_head`, `load_mtp`."""
    if algorithm is Algorithm.MTP:
        return load_mtp(folder, tensors, **options)
    return load_head(folder, HeadKind(algorithm.value), tensors, **options)


def _token_map(settings: DraftSettings, vocab_size: int) -> torch.Tensor | None:
    path = settings.speculative_token_map
    if path is None:
        return None
    if settings.algorithm is Algorithm.EAGLE3:
        log.warning("--speculative-token-map is ignored: EAGLE3 heads bring their own vocabulary")
        return None
    return read_token_map(path, vocab_size)


def build_dflash(settings: DraftSettings, host: Host) -> DflashDrafter:
    """Returns the drafter of a DFlash head. Raises: see `build_head`."""
    folder = settings.model_folder
    target_config = ModelConfig.from_folder(settings.target_folder)
    config = DflashConfig.from_folder(folder, target_config)
    device = device_for(settings)
    dtype = dtype_named(settings.dtype, config.layers.dtype, device)
    tensors = target_tensors(settings.target_folder, host.decoder, dtype=dtype, device=device)
    block_size = settings.speculative_dflash_block_size or config.block_size
    raise_problems(block_problems(settings, block_size))
    longest = config.layers.max_position_embeddings
    context = context_for(settings, longest, margin_tokens=block_size)
    options = draft_options(settings, config.layers, dtype, device)
    head = load_dflash(folder, tensors, dtype=dtype, device=device, options=options)
    log_quantisation(head)
    log.info("%s in %s on %s: blocks of %d", folder.name, dtype, device, block_size)
    pool, leases = allocate_kv(
        replace(settings, disable_radix_cache=True),
        head.kv_layout(settings.page_size, dtype),
        device,
        max_context_tokens=context,
        reserved_bytes=host.feature_bytes(head.feature_spec),
        most_tokens=host.most_tokens,
    )
    window = _window(settings, context, block_size, leases.num_pages)
    if window + block_size < target_config.max_position_embeddings:
        log.warning(
            "the draft looks back on %d tokens; the target's context is %d",
            *(window, target_config.max_position_embeddings),
        )
    return DflashDrafter(head, pool, leases, block_size=block_size, window_tokens=window)


def _window(settings: DraftSettings, context: int, block_size: int, num_pages: int) -> int:
    """Returns the tokens before a block that the drafter may keep. A sliding window needs a page
    more.

    Raises:
        SettingsError: the pool is too small for a block and a token before it.
    """
    num_slots = num_pages * settings.page_size
    window = min(context, num_slots - settings.page_size + 1) - block_size
    if window < 1:
        raise SettingsError(
            (
                f"--max-total-tokens gives {num_slots} tokens; a block of {block_size}, a page of "
                f"{settings.page_size} and a token to look back on do not fit",
            )
        )
    return window


# Language models.


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """The model runner and the tree grower of a standalone draft.

    Attributes:
        max_context_tokens: tokens that a forward can attend to.
    """

    runner: ModelRunner
    grower: TreeGrower
    leases: KvLeases
    max_context_tokens: int


def build_model(
    settings: DraftSettings,
    group: TensorGroup | None = None,
    leader: Leader | None = None,
    host: Host | None = None,
) -> BuiltModel:
    """Loads the model, or this process's shard of it, and allocates its KV pool.

    Args:
        group: processes that share the model; all of them call this at the same time.
        leader: rank 0's leader; None on other ranks.
        host: the target of this process, if there is one.

    Raises:
        CheckpointError: the folder cannot be served.
        SettingsError: memory does not hold what the settings ask for.
    """
    check_no_states(settings)
    folder = settings.model_folder
    device = device_for(settings)
    host = host or Host()
    config = ModelConfig.from_folder(folder)
    dtype = dtype_named(settings.dtype, config.dtype, device)
    context = context_for(settings, config.max_position_embeddings, margin_tokens=CONTEXT_MARGIN)
    vocabulary = target_vocabulary(settings)
    decoder = load_decoder(
        folder,
        dtype=dtype,
        device=device,
        options=draft_options(settings, config, dtype, device),
        show_progress=leader is not None or group is None,
        group=group,
        vocabulary=vocabulary,
        vocab_size=host.vocab_size or num_ids(settings.target_tokenizer or folder),
    )
    config = decoder.config
    log.info("%s in %s on %s", folder.name, dtype, device)
    if vocabulary is not None:
        log.info(
            "%s has another tokenizer than its target; it drafts %s",
            *(folder.name, vocabulary.words()),
        )
    log_quantisation(decoder)
    layout = decoder.kv_layout(settings.page_size, dtype)
    passes = pass_limits(settings, device, max_context_tokens=context)

    def largest_bytes() -> int:
        shape = settings.shape
        largest = GraphLimits(
            max_rows=num_pass_rows(shape, passes),
            max_sequences=passes.max_sequences,
            max_tail_width=shape.num_steps * shape.topk,
            max_context_tokens=passes.max_context_tokens,
        )
        return graph_memory_bytes(config, largest, dtype)

    pool, leases = allocate_kv(
        settings,
        layout,
        device,
        max_context_tokens=context,
        reserved_bytes=host.reserved_bytes(
            device, reserved_for_passes(settings, passes, largest_bytes)
        ),
        most_tokens=host.most_tokens,
        group=group,
    )
    runner = ModelRunner(decoder, pool, leader=leader)
    tree_leader = None if leader is None else TreeLeader(leader)
    grower = TreeGrower(DecoderModel(decoder, pool), passes, leader=tree_leader)
    return BuiltModel(runner, grower, leases, context)


def start_followers(settings: DraftSettings) -> Followers:
    """Starts the other processes of a sharded model. Returns once all have joined; they load their
    weights meanwhile.

    Raises:
        CheckpointError: the model folder has no usable config.
        SettingsError: the model cannot be split over so many GPUs, or there are too few GPUs.
    """
    check_shard(Shard(0, settings.tp_size), ModelConfig.from_folder(settings.model_folder))
    ranks = Ranks(settings.tp_size)
    devices = rank_devices(settings.device, ranks)
    return Followers(partial(_follow, settings), ranks, devices, service="draft")


def _follow(settings: DraftSettings, seat: Seat, pipe: Connection) -> None:
    group = seat.join(settings)
    built = build_model(replace(settings, device=str(seat.device)), group)
    follow(built.runner, group, pipe, TreeFollower(built.grower).take)
