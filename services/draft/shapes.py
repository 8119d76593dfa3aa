"""The tree each algorithm grows when no shape is set."""

from __future__ import annotations

from pathlib import Path

from shared.models.config_file import ConfigFile
from shared.tokens import TreeShape

CHAIN_SHAPE = TreeShape(num_steps=3, topk=1, num_draft_tokens=4)
LLAMA_HEAD_SHAPE = TreeShape(num_steps=5, topk=4, num_draft_tokens=8)
NGRAM_DRAFT_TOKENS = 12
_WIDE_FAMILIES = ("Llama", "Grok")


def head_shape(target_folder: Path) -> TreeShape:
    """Returns the shape for a draft head of a target: a tree for Llama and Grok, else a chain.

    Raises:
        CheckpointError: the folder has no readable config.json.
    """
    names = ConfigFile.read(target_folder / "config.json").texts("architectures")
    return LLAMA_HEAD_SHAPE if any(n.startswith(_WIDE_FAMILIES) for n in names) else CHAIN_SHAPE
