"""The settings of the draft that a target hosts, and checks that they fit the target's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from services.draft.algorithm import Algorithm
from services.draft.drafter_factory import feature_layers
from services.draft.settings import MOST_PAGE_TOKENS, DraftSettings, checked_models
from services.target.settings import (
    NO_DRAFT,
    DeviceRoundsChoice,
    DraftNeeds,
    TargetSettings,
    rejection_flag,
)
from shared.errors import raise_problems
from shared.model_files import has_tokenizer, num_ids, tokenizer_sha256
from shared.settings import load_settings
from shared.settings_field import declared_fields

_PREFIX = "--draft-"
_WITHOUT_DISTRIBUTIONS = {
    Algorithm.NGRAM: "repeats tokens and draws none",
    Algorithm.DFLASH: "scores a block at once, not each token after those before it",
}


def embedded_settings(
    settings: TargetSettings, arguments: Sequence[str], env: Mapping[str, str]
) -> DraftSettings:
    """Reads the settings of the draft that a target hosts. The draft has the target's device and
    dtype, and by default its page size, because rounds on the device need equal page sizes.

    Args:
        settings: of the target, whose model is on this machine.
        arguments: the flags that are not the target's; a flag `--X` of both is `--draft-X` here.
        env: `OUTRIDER_DRAFT_*` is read.

    Raises:
        SettingsError: names every setting of the draft that is invalid or does not fit the target.
    """
    inherited = [f"--device={settings.device}", f"--dtype={settings.dtype.value}"]
    given = {name: value for name, value in env.items() if value}
    if settings.page_size <= MOST_PAGE_TOKENS:
        given = {"OUTRIDER_DRAFT_PAGE_SIZE": str(settings.page_size), **given}
    chosen = load_settings(
        DraftSettings,
        service="draft",
        arguments=[*map(_own_name, arguments), *inherited],
        env=given,
    )
    if chosen.algorithm.reads_features and chosen.target_model_path is None:
        chosen = replace(chosen, target_model_path=settings.model_path)
    chosen = with_target_tokenizer(checked_models(chosen), settings)
    check_embedded(settings, chosen)
    return chosen


def draft_needs(settings: TargetSettings, draft: DraftSettings | None) -> DraftNeeds:
    """Returns what a hosted draft, if there is one, needs from its target.

    Raises:
        CheckpointError: a config or weights are missing, or cannot be served.
    """
    if draft is None:
        return NO_DRAFT
    return DraftNeeds(
        feature_layers(draft), draft.algorithm.has_model, _weight_bytes(settings, draft)
    )


def _weight_bytes(settings: TargetSettings, draft: DraftSettings) -> int:
    """Returns the approximate size of a draft's weights in bytes: that of its files, or for the
    target's next-token layers that of one layer. A head borrows the embedding and output tables of
    a target in one process; of a target in several processes it needs copies."""
    if not draft.algorithm.has_model:
        return 0
    # Imported late: settings are also read where torch is not installed.
    from shared.models.checkpoint import Checkpoint
    from shared.models.config import ModelConfig

    size_bytes = Checkpoint.open(draft.model_folder).size_bytes
    if not draft.algorithm.reads_features:
        return size_bytes
    target = ModelConfig.from_folder(draft.target_folder)
    if draft.model_folder == draft.target_folder:
        size_bytes //= target.num_layers
    if settings.ranks.size > 1:
        num_tables = 1 if draft.algorithm is Algorithm.EAGLE3 else 2
        item_bytes = 4 if target.dtype is None else target.dtype.itemsize
        size_bytes += num_tables * target.vocab_size * target.hidden_size * item_bytes
    return size_bytes


def with_target_tokenizer(draft: DraftSettings, target: TargetSettings) -> DraftSettings:
    """Returns the settings of a draft, with the target's tokenizer named if that is another one or
    has another number of ids.

    Raises:
        CheckpointError: a tokenizer cannot be read.
    """
    is_named = draft.target_tokenizer is not None
    if is_named or draft.algorithm is not Algorithm.STANDALONE:
        return draft
    tokenizer = target.tokenizer_folder
    if not has_tokenizer(draft.model_folder):
        return draft
    is_same = tokenizer_sha256(draft.model_folder) == tokenizer_sha256(tokenizer)
    if is_same and num_ids(draft.model_folder) == num_ids(tokenizer):
        return draft
    return replace(draft, tokenizer=tokenizer)


def _own_name(word: str) -> str:
    flag = f"--{word.removeprefix(_PREFIX)}"
    fields = declared_fields(TargetSettings)
    is_prefixed = word.startswith(_PREFIX) and flag.partition("=")[0] in {f.flag for f in fields}
    return flag if is_prefixed else word


def check_embedded(settings: TargetSettings, draft: DraftSettings) -> None:
    """Raises:
    SettingsError: names every setting of the draft that does not fit the target's process, its
        verification rule or the rounds on the device that it asks for.
    """
    raise_problems(_problems(settings, draft))


def _problems(settings: TargetSettings, draft: DraftSettings) -> Iterator[str]:
    algorithm = draft.algorithm
    if draft.tp_size > 1:
        yield (
            f"OUTRIDER_DRAFT_TP_SIZE is {draft.tp_size}; a draft that a target hosts is whole, on "
            f"the target's first GPU: --tp-size cuts the target alone, and a remote draft can be "
            f"cut"
        )
    if settings.device_rounds is DeviceRoundsChoice.ON and not algorithm.has_model:
        yield (
            "--device-rounds on needs a draft with a model; --speculative-algorithm is "
            f"{algorithm.value}"
        )
    elif settings.device_rounds is DeviceRoundsChoice.ON and draft.page_size != settings.page_size:
        yield (
            f"--device-rounds on needs pages of one size; --page-size is {settings.page_size}, the "
            f"draft's {draft.page_size}"
        )
    if not settings.verification.draws_chains:
        return
    flag = rejection_flag(settings)
    if algorithm in _WITHOUT_DISTRIBUTIONS:
        yield (
            f"{flag} needs the distribution that each token was drawn from; {algorithm.value} "
            f"{_WITHOUT_DISTRIBUTIONS[algorithm]}"
        )
    elif draft.speculative_eagle_topk not in (None, 1):
        yield f"--speculative-eagle-topk is {draft.speculative_eagle_topk}; {flag} needs chains, 1"
    if draft.speculative_outcome_budget:
        yield (
            f"--speculative-outcome-budget is {draft.speculative_outcome_budget}; {flag} needs 0, "
            f"because chains prepared for chosen verdicts are not drawn from a distribution"
        )
