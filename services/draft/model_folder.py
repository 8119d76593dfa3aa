"""Reads a draft's folder and its target's, as far as configs and tokenizers go."""

from __future__ import annotations

from services.draft.algorithm import Algorithm
from services.draft.settings import DraftSettings
from shared.errors import CheckpointError
from shared.vocabulary_map import VocabularyMap, read_vocabulary_map


def feature_layers(settings: DraftSettings) -> tuple[int, ...]:
    """Returns the layers as `FeatureSpec.layer_indices` counts them; none for other drafters.

    Raises:
        CheckpointError: a config is missing or cannot be served.
    """
    if not settings.algorithm.reads_features:
        return ()
    # A worker without a model runs where torch is not installed.
    from shared.models.config import ModelConfig

    target = ModelConfig.from_folder(settings.target_folder)
    if settings.algorithm is Algorithm.MTP:
        return (target.mtp_feature_layer,)
    if settings.algorithm is Algorithm.DFLASH:
        from shared.models.heads.dflash import DflashConfig

        return DflashConfig.from_folder(settings.model_folder, target).feature_layers
    from shared.models.heads.config import HeadConfig, HeadKind

    kind = HeadKind(settings.algorithm.value)
    return HeadConfig.from_folder(settings.model_folder, kind, target).feature_layers


def check_no_states(settings: DraftSettings) -> None:
    """Raises: CheckpointError if the draft is a model with linear attention, or the folder has no
    config that can be served."""
    if settings.algorithm is not Algorithm.STANDALONE:
        return
    # A worker without a model runs where torch is not installed.
    from shared.models.config import ModelConfig

    config = ModelConfig.from_folder(settings.model_folder)
    if config.delta is not None:
        raise CheckpointError(
            f"{settings.model_folder}: {config.architecture} has linear attention; it is not "
            f"supported as a draft model (--speculative-algorithm {settings.algorithm.value})"
        )


def target_vocabulary(settings: DraftSettings) -> VocabularyMap | None:
    """Returns how the draft's tokens become its target's; None where they are the same, or settings
    do not name another tokenizer.

    Raises:
        CheckpointError: see `read_vocabulary_map`.
    """
    target = settings.target_tokenizer
    if settings.algorithm is not Algorithm.STANDALONE or target is None:
        return None
    return read_vocabulary_map(settings.model_folder, target)
