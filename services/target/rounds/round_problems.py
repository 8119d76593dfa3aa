"""Finds settings that rule out rounds on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.target.fallback import Fallback
from services.target.flag_choices import DeviceRoundsChoice, DraftPlacement, VerificationMode

if TYPE_CHECKING:
    from services.target.settings import TargetSettings

_FLAG = "--device-rounds on"


def round_problems(settings: TargetSettings) -> list[str]:
    """Returns a line for each thing that rounds cannot be with, none when all is well. `auto` asks
    for nothing."""
    if settings.device_rounds is not DeviceRoundsChoice.ON:
        return []
    problems = []
    if settings.draft is not DraftPlacement.EMBEDDED:
        problems += _remote_problems(settings)
    if settings.disable_cuda_graph:
        problems.append(f"{_FLAG}: rounds on a GPU are CUDA graphs; leave --disable-cuda-graph out")
    if settings.verification is VerificationMode.POINT_MASS:
        problems.append(f"{_FLAG} needs the coupled rule; --verification-mode is point-mass")
    return problems


def _remote_problems(settings: TargetSettings) -> list[str]:
    """The device selects among whole trees that drafts have pushed, where the model is whole."""
    problems = []
    if settings.speculative_fallback is not Fallback.NONE:
        problems.append(
            f"{_FLAG} with --draft remote needs --speculative-fallback none; it is "
            f"{settings.speculative_fallback.value}, whose trees are made on the host"
        )
    if settings.tp_size > 1:
        problems.append(
            f"{_FLAG} with --draft remote needs the model on one device; --tp-size is "
            f"{settings.tp_size}"
        )
    return problems
