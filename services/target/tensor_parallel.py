"""The processes that share a target's model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

from services.followers import Followers, Seat, check_shard, rank_devices
from services.target.runner_factory import build_runner, first_shard
from services.target.settings import TargetSettings
from services.target.weight_stager import (
    ApplyCall,
    FollowingStager,
    StageCall,
    TableCall,
    WeightStager,
)
from shared.models.config import ModelConfig
from shared.runtime.followers import RoundFollower
from shared.runtime.lockstep import follow


def start_followers(
    settings: TargetSettings, feature_layers: tuple[int, ...] = (), *, has_lanes: bool = False
) -> Followers:
    """Starts them and returns once all have joined; they load their weights meanwhile.

    Args:
        feature_layers, has_lanes: arguments of `build_runner` in this process.

    Raises:
        CheckpointError: the model folder has no usable config.
        SettingsError: the model cannot be cut so, or there are not as many GPUs.
    """
    check_shard(first_shard(settings), ModelConfig.from_folder(settings.model_path))
    devices = rank_devices(settings.device, settings.tp_size)
    work = partial(_follow, settings, feature_layers, has_lanes)
    return Followers(work, devices, service="target")


def _follow(
    settings: TargetSettings,
    feature_layers: tuple[int, ...],
    has_lanes: bool,
    seat: Seat,
    pipe: Connection,
) -> None:
    group = seat.join(settings)
    own = replace(settings, device=str(seat.device))
    runner = build_runner(own, group, feature_layers=feature_layers, has_lanes=has_lanes).runner
    stager = WeightStager(runner.decoder, own.model_path, own.model_options)
    weights = FollowingStager(stager, group, runner.device)
    rounds = RoundFollower(runner)

    def take(message: object) -> None:
        if isinstance(message, StageCall | ApplyCall | TableCall):
            weights.take(message)
        else:
            rounds.take(message)

    follow(runner, group, pipe, take)
