"""What is wrong with the draft a target hosts, taken together with the target's own settings."""

from __future__ import annotations

from services.draft.algorithm import Algorithm
from services.draft.drafters.drafter import Drafter
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.draft.settings import DraftSettings
from services.target.flag_choices import DeviceRoundsChoice
from services.target.settings import TargetSettings
from services.target.verification_problems import rejection_flag
from shared.errors import SettingsError

_HEADS = "an EAGLE, EAGLE3 or one-layer MTP head"
_WITHOUT_LAWS = {
    Algorithm.NGRAM: "repeats tokens and draws none",
    Algorithm.DFLASH: "scores a block at once, not each token after those before it",
}


def check_embedded(settings: TargetSettings, draft: DraftSettings) -> None:
    """Raises:
    SettingsError: names every setting of the draft that the target's process or rule, or rounds on
        the device that it asks for, cannot do with.
    """
    problems = [
        *_process_problems(draft),
        *_round_problems(settings, draft),
        *_law_problems(settings, draft),
    ]
    if problems:
        raise SettingsError(tuple(problems))


def _process_problems(draft: DraftSettings) -> list[str]:
    if draft.tp_size == 1:
        return []
    return [
        f"OUTRIDER_DRAFT_TP_SIZE is {draft.tp_size}; a draft that a target hosts is whole, on the "
        f"target's first GPU: --tp-size cuts the target alone, and a remote draft can be cut"
    ]


def _round_problems(settings: TargetSettings, draft: DraftSettings) -> list[str]:
    if settings.device_rounds is not DeviceRoundsChoice.ON:
        return []
    problems = []
    if not draft.algorithm.lends_head:
        problems.append(
            f"--device-rounds on needs {_HEADS}; --speculative-algorithm is {draft.algorithm.value}"
        )
    elif draft.page_size != settings.page_size:
        problems.append(
            f"--device-rounds on needs pages of one size; --page-size is {settings.page_size}, the "
            f"draft's {draft.page_size}"
        )
    return problems


def _law_problems(settings: TargetSettings, draft: DraftSettings) -> list[str]:
    if not settings.verification.draws_chains:
        return []
    flag, algorithm = rejection_flag(settings), draft.algorithm
    problems = []
    if algorithm in _WITHOUT_LAWS:
        problems.append(
            f"{flag} needs the law that each token was drawn from; {algorithm.value} "
            f"{_WITHOUT_LAWS[algorithm]}"
        )
    elif draft.speculative_eagle_topk not in (None, 1):
        problems.append(
            f"--speculative-eagle-topk is {draft.speculative_eagle_topk}; {flag} needs chains, 1"
        )
    if draft.speculative_outcome_budget:
        problems.append(
            f"--speculative-outcome-budget is {draft.speculative_outcome_budget}; {flag} needs 0, "
            f"because chains prepared for chosen verdicts are not drawn from a law"
        )
    return problems


def check_drafter(settings: TargetSettings, drafter: Drafter) -> None:
    """Raises:
    SettingsError: the target's rule, or rounds that it asks for, cannot do with what was loaded.
    """
    if not isinstance(drafter, MultiLayerDrafter):
        return
    if settings.verification.draws_chains:
        raise SettingsError(
            (f"{rejection_flag(settings)} needs a head of one layer; this one has several",)
        )
    if settings.device_rounds is DeviceRoundsChoice.ON:
        raise SettingsError((f"--device-rounds on needs {_HEADS}; this one has several layers",))
