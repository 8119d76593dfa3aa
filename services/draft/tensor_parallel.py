"""The processes that share a draft's language model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

from services.draft.drafters.standalone import build_model
from services.draft.settings import DraftSettings
from services.followers import Followers, Seat, check_shard, rank_devices
from services.ranks import Ranks
from shared.models.config import ModelConfig
from shared.models.shard import Shard
from shared.runtime.followers import TreeFollower
from shared.runtime.lockstep import follow


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
