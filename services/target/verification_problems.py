"""Checks a target's verification rule against its other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.target.flag_choices import (
    DeviceRoundsChoice,
    DraftPlacement,
    VerificationChoice,
    VerificationMode,
)

if TYPE_CHECKING:
    from services.target.settings import TargetSettings


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
