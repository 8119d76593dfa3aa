"""Drafts with a smaller language model that has its own paged KV and prefix cache.

KV of the accepted path is kept: a chain's is in place already, a tree's is moved to the front of
its tail. What is drafted ahead is in pages of its own, see `branch_drafter`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

import torch

from services.draft.drafters.branch_drafter import BranchDrafter
from services.draft.drafters.contexts import CONTEXT_MARGIN
from services.draft.drafters.pass_trees import PassTrees
from services.draft.drafters.placement import (
    Host,
    allocate_kv,
    context_for,
    device_for,
    log_quantisation,
    pass_limits,
    reserved_for_model,
)
from services.draft.drafters.standalone_contexts import StandaloneContexts
from services.draft.drafters.tree_drafter import TreeDrafter
from services.draft.events import FeatureRows
from services.draft.model_folder import check_no_states, target_vocabulary
from services.draft.sequence import DraftSequence
from services.draft.settings import DraftSettings
from services.followers import Followers, Seat, check_shard, rank_devices
from services.ranks import Ranks
from shared.kv.leases import KvLeases
from shared.layers.tensor_group import TensorGroup
from shared.model_files import num_ids
from shared.models.config import ModelConfig
from shared.models.loader import load_decoder
from shared.models.shard import Shard
from shared.runtime.device import dtype_named
from shared.runtime.followers import TreeFollower
from shared.runtime.lockstep import Leader, TreeLeader, follow
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import DecoderModel
from shared.tokens import Verdict

log = logging.getLogger(__name__)


class StandaloneDrafter(TreeDrafter):
    """See `TreeDrafter`.

    Attributes:
        decoder: of the draft model.
    """

    _contexts: StandaloneContexts
    _branches: BranchDrafter

    def __init__(
        self,
        runner: ModelRunner,
        leases: KvLeases,
        grower: TreeGrower,
        *,
        max_context_tokens: int,
        generator: torch.Generator | None = None,
    ) -> None:
        """Args:
        grower: of the runner's model and pool.
        generator: see `PassTrees`.
        """
        self.decoder = runner.decoder
        model = DecoderModel(runner.decoder, runner.pool)
        contexts = StandaloneContexts(runner, leases, max_context_tokens=max_context_tokens)
        branches = BranchDrafter(PassTrees(grower, contexts, generator), contexts)
        super().__init__(model, contexts, branches, max_context_tokens=max_context_tokens)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        self._branches.commit(sequence, verdict.committed_token_ids)


# Loads the draft model and its KV pool.


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """The model runner and the tree grower of a standalone draft.

    Attributes:
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
        built.runner, built.leases, built.grower, max_context_tokens=built.max_context_tokens
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
    log_quantisation(decoder)
    layout = decoder.kv_layout(settings.page_size, dtype)
    passes = pass_limits(settings, device, max_context_tokens=context)
    reserved_bytes = reserved_for_model(settings, config, dtype, passes)
    pool, leases = allocate_kv(
        settings,
        layout,
        device,
        max_context_tokens=context,
        reserved_bytes=host.reserved_bytes(device, reserved_bytes),
        most_tokens=host.most_tokens,
        group=group,
    )
    runner = ModelRunner(decoder, pool, leader=leader)
    tree_leader = None if leader is None else TreeLeader(leader)
    grower = TreeGrower(DecoderModel(decoder, pool), passes, leader=tree_leader)
    return BuiltModel(runner, grower, leases, context)


# The processes that share the model.


def start_followers(settings: DraftSettings) -> Followers:
    """Starts them and returns once all have joined; they load their weights meanwhile.

    Raises:
        CheckpointError: the model folder has no usable config.
        SettingsError: the model cannot be cut so, or there are not as many GPUs.
    """
    check_shard(Shard(0, settings.tp_size), ModelConfig.from_folder(settings.model_folder))
    ranks = Ranks(settings.tp_size)
    devices = rank_devices(settings.device, ranks)
    return Followers(partial(_follow, settings), ranks, devices, service="draft")


def _follow(settings: DraftSettings, seat: Seat, pipe: Connection) -> None:
    group = seat.join(settings)
    built = build_model(replace(settings, device=str(seat.device)), group)
    follow(built.runner, group, pipe, TreeFollower(built.grower).take)
