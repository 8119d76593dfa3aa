"""Problems with the target's settings that only show between two of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.target.fallback import Fallback
from services.target.flag_choices import (
    DeviceRoundsChoice,
    DraftPlacement,
    VerificationChoice,
    VerificationMode,
)

if TYPE_CHECKING:
    from services.target.settings import TargetSettings

_FLAG = "--device-rounds on"


def parallel_problems(settings: TargetSettings) -> list[str]:
    """Returns a line for each number of processes that does not go with the others."""
    problems, size = [], settings.tp_size
    if settings.ep_size not in (1, size):
        problems.append(f"--ep-size: {settings.ep_size}; it must be 1 or --tp-size, {size}")
    if not settings.enable_dp_attention and settings.dp_size > 1:
        problems.append(
            "--dp-size: replicas are targets of their own: start each with `outrider target`, and "
            "one gateway with `outrider gateway --target A --target B`"
        )
    if settings.enable_dp_attention and not 1 < settings.dp_size == size:
        problems.append(
            f"--enable-dp-attention: --dp-size is {settings.dp_size} and --tp-size {size}; they "
            f"must be one number, 2 or more, of GPUs that each have sequences of their own"
        )
    return problems


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
    if settings.speculative_fallback is Fallback.NONE:
        return []
    return [
        f"{_FLAG} with --draft remote needs --speculative-fallback none; it is "
        f"{settings.speculative_fallback.value}, whose trees are made on the host"
    ]


def verification_problems(settings: TargetSettings) -> list[str]:
    """Returns a line for each thing that is wrong, none when all is well."""
    return [*_threshold_problems(settings), *_rejection_problems(settings)]


def rejection_flag(settings: TargetSettings) -> str:
    """Returns the flag that asks for verification by the draft's distributions."""
    if settings.speculative_use_block_verification:
        return "--speculative-use-block-verification"
    return "--speculative-use-rejection-sampling"


def _threshold_problems(settings: TargetSettings) -> list[str]:
    thresholds = (
        settings.speculative_accept_threshold_single,
        settings.speculative_accept_threshold_acc,
    )
    rule = settings.verification
    if thresholds == (1.0, 1.0) or rule is VerificationMode.POINT_MASS:
        return []
    return [
        "--speculative-accept-threshold-single and -acc need --verification-mode point-mass; "
        f"the {rule.value} rule has no thresholds"
    ]


def _rejection_problems(settings: TargetSettings) -> list[str]:
    if not settings.verification.draws_chains:
        return []
    flag, problems = rejection_flag(settings), []
    if settings.draft is not DraftPlacement.EMBEDDED:
        problems.append(
            f"{flag} needs --draft embedded: the distributions that tokens were drawn from stay "
            f"in the process that drew them"
        )
    if settings.verification_mode is not VerificationChoice.COUPLED:
        problems.append(
            f"{flag} and --verification-mode {settings.verification_mode.value} name two rules; "
            f"leave one out"
        )
    if settings.device_rounds is DeviceRoundsChoice.ON:
        problems.append(
            f"--device-rounds on: rounds on the device verify by the coupled rule; {flag} needs "
            f"auto or off"
        )
    return problems
