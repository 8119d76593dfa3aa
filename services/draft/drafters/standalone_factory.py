"""Loads the draft model and its KV pool."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from services.draft.drafters.grower_factory import pass_limits, reserved_for_model
from services.draft.drafters.host import Host
from services.draft.drafters.placement import (
    allocate_kv,
    context_for,
    device_for,
    log_quantisation,
)
from services.draft.drafters.standalone import CONTEXT_MARGIN, StandaloneDrafter
from services.draft.recurrent_drafts import check_no_states
from services.draft.settings import DraftSettings
from services.draft.vocabulary import target_vocabulary
from services.followers import Followers
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.layers.tensor_group import TensorGroup
from shared.model_files import num_ids
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.runtime.device import dtype_named
from shared.runtime.graph_inputs import GraphLimits
from shared.runtime.graphs import ForwardGraphs, graph_memory_bytes
from shared.runtime.lockstep import Leader
from shared.runtime.memory import CacheSize, fraction_in_force, refusing_shortage
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_lockstep import TreeLeader
from shared.runtime.tree_model import DecoderModel

log = logging.getLogger(__name__)
MOST_TAIL_ROWS = 512
"""Rows of trees behind the context that a graph reaches; larger forwards run without."""


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """The model runner and the tree grower of a standalone draft.

    Attributes:
        grower: None where trees grow level by level.
        max_context_tokens: that a forward can look back on.
    """

    runner: ModelRunner
    grower: TreeGrower
    leases: KvLeases
    max_context_tokens: int


def build_standalone(
    settings: DraftSettings, followers: Followers | None = None, host: Host | None = None
) -> StandaloneDrafter:
    """Returns the drafter with weights loaded.

    Args:
        followers: the other processes that hold a part of the model; None holds it all.
        host: the target of this process, if there is one.

    Raises:
        CheckpointError: the folder cannot be served.
        SettingsError: memory does not hold what the settings ask for.
    """
    if followers is None:
        built = build_model(settings, host=host)
    else:
        built = build_model(settings, followers.group, followers.leader)
    return StandaloneDrafter(
        built.runner,
        built.leases,
        max_context_tokens=built.max_context_tokens,
        grower=built.grower,
    )


def build_model(
    settings: DraftSettings,
    group: TensorGroup | None = None,
    leader: Leader | None = None,
    host: Host | None = None,
) -> BuiltModel:
    """Loads the model, or this process's part of it, and allocates its KV pool.

    Args:
        group: processes that share the model; all of them call this at the same time.
        leader: of rank 0.
        host: see `build_standalone`.

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
        options=settings.model_options,
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
    log_quantisation(settings, decoder)
    layout = decoder.kv_layout(settings.page_size, dtype)
    limits = _graph_limits(settings, context)
    passes = pass_limits(settings, device, max_context_tokens=context)
    reserved_bytes = 0 if limits is None else graph_memory_bytes(config, limits, dtype)
    reserved_bytes += reserved_for_model(settings, config, dtype, passes)
    pool, leases = allocate_kv(
        settings,
        layout,
        device,
        max_context_tokens=context,
        reserved_bytes=host.reserved_bytes(device, reserved_bytes),
        most_tokens=host.most_tokens,
        group=group,
    )
    graphs = None
    if limits is not None:
        cache = CacheSize(
            pool.storage.nbytes,
            fraction_in_force(settings.mem_fraction_static, device),
            settings.max_total_tokens,
        )
        is_first = leader is not None or group is None
        graphs = _captured(decoder, pool, limits, cache, show_progress=is_first)
    runner = ModelRunner(decoder, pool, graphs, leader=leader)
    tree_leader = None if leader is None else TreeLeader(leader)
    grower = TreeGrower(DecoderModel(decoder, pool), passes, leader=tree_leader)
    return BuiltModel(runner, grower, leases, context)


def _captured(
    decoder: Decoder, pool: KvPool, limits: GraphLimits, cache: CacheSize, *, show_progress: bool
) -> ForwardGraphs:
    """Returns all graphs; processes of a group capture the same one at the same time."""
    graphs = ForwardGraphs(decoder, pool, limits, cache)
    words = "no memory for CUDA graphs of {} rows: {} or --max-running-requests, or leave {} out"
    with refusing_shortage(
        lambda shortage: words.format(
            limits.max_rows, cache.advice(shortage), "--enable-cuda-graph"
        )
    ):
        graphs.capture(show_progress=show_progress)
    return graphs


def _graph_limits(settings: DraftSettings, max_context_tokens: int) -> GraphLimits | None:
    if not settings.enable_cuda_graph:
        return None
    return GraphLimits.of(
        max_sequences=settings.max_running_requests,
        max_tree_nodes=MOST_TAIL_ROWS,
        max_context_tokens=max_context_tokens + MOST_TAIL_ROWS,
    )
