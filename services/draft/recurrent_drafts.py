"""Models with recurrent states are no drafts."""

from __future__ import annotations

from services.draft.algorithm import Algorithm
from services.draft.settings import DraftSettings
from shared.errors import CheckpointError
from shared.models.config import ModelConfig


def check_no_states(settings: DraftSettings) -> None:
    """Raises: CheckpointError if the draft is a model with linear attention, or the folder has no
    config that can be served."""
    if settings.algorithm is not Algorithm.STANDALONE:
        return
    config = ModelConfig.from_folder(settings.model_folder)
    if config.delta is not None:
        raise CheckpointError(
            f"{settings.model_folder}: {config.architecture} has linear attention; it is not "
            f"supported as a draft model (--speculative-algorithm {settings.algorithm.value})"
        )
