"""Checks a loaded embedded drafter against its target."""

from __future__ import annotations

from services.draft.drafters.drafter import Drafter
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.embedded_settings import HEADS
from services.target.flag_choices import DeviceRoundsChoice
from services.target.settings import TargetSettings
from services.target.verification_problems import rejection_flag
from shared.errors import SettingsError


def check_drafter(settings: TargetSettings, drafter: Drafter) -> None:
    """Raises:
    SettingsError: the loaded drafter does not fit the target's verification rule or its rounds.
    """
    if not isinstance(drafter, MultiLayerDrafter):
        return
    if settings.verification.draws_chains:
        raise SettingsError(
            (f"{rejection_flag(settings)} needs a head of one layer; this one has several",)
        )
    if settings.device_rounds is DeviceRoundsChoice.ON:
        raise SettingsError((f"--device-rounds on needs {HEADS}; this one has several layers",))
