"""The vocabulary of a STANDALONE draft and that of its target."""

from __future__ import annotations

from pathlib import Path

from services.draft.algorithm import Algorithm
from services.draft.settings import DraftSettings
from shared.model_files import read_json
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


def num_target_ids(folder: Path) -> int:
    """Returns the ids of the target's model, where its folder is that of the tokenizer; else 0."""
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else 0)
    return size if isinstance(size, int) else 0
