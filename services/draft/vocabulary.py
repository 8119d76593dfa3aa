"""The vocabulary of a STANDALONE draft and that of its target."""

from __future__ import annotations

from services.draft.algorithm import Algorithm
from services.draft.settings import DraftSettings
from shared.vocabulary_map import VocabularyMap, read_vocabulary_map


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
