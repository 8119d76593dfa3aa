"""Selects the most frequent tokens as a reduced draft vocabulary.

Source: Zhao et al., FR-Spec, arXiv 2502.14856, section 3.2.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from services.draft.training.documents import Documents
from shared.errors import CheckpointError


def frequent_tokens(
    sources: Sequence[Documents], *, size: int, vocab_size: int, always: Collection[int] = ()
) -> tuple[list[int], float]:
    """Returns `size` token ids, the most frequent first, and the share of all text they cover.

    Args:
        always: tokens kept however rare they are, such as those that end an answer.

    Raises:
        CheckpointError: `size` is larger than the vocabulary, or a token is outside it.
    """
    if not 1 <= size <= vocab_size:
        raise CheckpointError(f"token map of {size}; it must be in [1, {vocab_size}]")
    counts = np.sum([documents.counts(vocab_size) for documents in sources], axis=0)
    ranked = counts.copy()
    ranked[list(always)] = counts.max() + 1
    chosen = np.argsort(-ranked, kind="stable")[:size]
    return chosen.tolist(), float(counts[chosen].sum() / max(counts.sum(), 1))


def write_token_map(token_ids: Sequence[int], path: Path) -> None:
    """Writes the list whose index is the draft id."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(token_ids)) + "\n", encoding="utf-8")


def load_token_map(path: Path) -> list[int]:
    """Raises: CheckpointError if the file is no JSON list of distinct ids."""
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise CheckpointError(f"{path} must be a list of token ids")
    if len(set(ids)) != len(ids):
        raise CheckpointError(f"{path} has {len(ids)} ids, {len(set(ids))} of them distinct")
    return ids
