"""The other ranks of a target: processes that share its model."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

from services.followers import Followers, Seat, check_shard, follow_first_host, rank_devices
from services.hosts import Terms
from services.target.engine_factory import build_runner, first_shard
from services.target.settings import NO_DRAFT, DraftNeeds, TargetSettings
from services.target.weight_stager import FollowingStager, RankCall, WeightStager
from shared.models.config import ModelConfig
from shared.models.config_file import CONFIG_FILE
from shared.runtime.followers import RoundFollower
from shared.runtime.lockstep import follow
from shared.settings import shown_settings

_HOST_SETTINGS = ("node-rank", "model-path", "tokenizer-path")
"""Settings that may differ between hosts."""
_STOP_MARGIN_S = 5.0
"""Added to the grace period that rank 0 gives its requests."""


def start_followers(settings: TargetSettings, draft: DraftNeeds = NO_DRAFT) -> Followers:
    """Starts the other ranks and returns once all have joined; they then load their weights.

    Args:
        draft: argument of `build_runner` in this process.

    Raises:
        CheckpointError: the model folder has no usable config.
        SettingsError: the model cannot be sharded as set, there are too few GPUs, or other hosts do
            not connect or have other settings.
    """
    terms = _terms(settings, draft)
    devices = rank_devices(settings.device, settings.ranks)
    work = partial(_follow, settings, draft)
    return Followers(work, settings.ranks, devices, service="target", terms=terms)


def run_followers(settings: TargetSettings, draft: DraftNeeds = NO_DRAFT) -> None:
    """Runs the ranks of a host other than the first, until rank 0 ends; see `follow_first_host`.

    Args, raises: see `start_followers`.
    """
    follow_first_host(
        partial(_follow, settings, draft),
        settings.ranks,
        rank_devices(settings.device, settings.ranks),
        service="target",
        terms=_terms(settings, draft),
        grace_s=settings.drain_grace_s + _STOP_MARGIN_S,
    )


def _terms(settings: TargetSettings, draft: DraftNeeds) -> Terms:
    """Returns what all hosts must agree on.

    Raises:
        SettingsError: the model cannot be sharded as set.
    """
    check_shard(first_shard(settings), ModelConfig.from_folder(settings.model_path))
    shown = shown_settings(settings)
    agreed = {f"--{name}": text for name, text in shown.items() if name not in _HOST_SETTINGS}
    config = (settings.model_path / CONFIG_FILE).read_bytes()
    agreed[f"SHA-256 of {CONFIG_FILE}"] = hashlib.sha256(config).hexdigest()
    agreed["layers that the embedded draft reads"] = str(draft.feature_layers)
    agreed["rounds with the embedded draft"] = str(draft.has_lanes)
    return Terms(settings.dist_secret, agreed)


def _follow(settings: TargetSettings, draft: DraftNeeds, seat: Seat, pipe: Connection) -> None:
    group = seat.join(settings)
    settings = replace(settings, device=str(seat.device))
    runner = build_runner(settings, group, draft=draft).runner
    stager = WeightStager(runner.decoder, settings.model_path, settings.model_options)
    weights = FollowingStager(stager, group, runner.device)
    rounds = RoundFollower(runner)

    def take(message: object) -> None:
        if isinstance(message, RankCall):
            weights.take(message)
        else:
            rounds.take(message)

    follow(runner, group, pipe, take)
