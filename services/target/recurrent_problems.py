"""What a target does not do with layers that have recurrent states."""

from __future__ import annotations

import torch

from services.target.flag_choices import DeviceRoundsChoice
from services.target.settings import TargetSettings
from shared.errors import SettingsError
from shared.model_options import KvDtype
from shared.models.config import ModelConfig
from shared.models.shard import Shard


def check_recurrent(settings: TargetSettings, config: ModelConfig, device: torch.device) -> None:
    """Raises: SettingsError with a line for each flag that such a model is not served with."""
    if config.delta is None:
        return
    problems = [*Shard(0, settings.tp_size, settings.ep_size > 1).problems(config)]
    why = f"{config.architecture} has linear attention"
    if settings.kv_cache_dtype is KvDtype.FP8_E4M3:
        problems.append(f"--kv-cache-dtype is fp8_e4m3; {why}, whose inputs are not kept in 8 bits")
    if device.type == "cuda" and settings.device_rounds is DeviceRoundsChoice.ON:
        problems.append(
            f"--device-rounds is on; {why}, whose states the host plans: on a GPU it needs auto or "
            f"off"
        )
    if problems:
        raise SettingsError(tuple(problems))


def has_device_rounds(settings: TargetSettings, config: ModelConfig, device: torch.device) -> bool:
    """Whether rounds are to stay on the device where they can: on a GPU their graphs leave the host
    no turn, in which it plans states."""
    is_cuda = device.type == "cuda"
    return settings.has_device_rounds(is_cuda=is_cuda) and not (
        is_cuda and config.delta is not None
    )
