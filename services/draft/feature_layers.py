"""The target layers whose hidden states a head reads, from the configs alone."""

from __future__ import annotations

from services.draft.algorithm import Algorithm
from services.draft.settings import DraftSettings


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
