"""The tree each algorithm grows when no shape is set."""

from __future__ import annotations

from pathlib import Path

from shared.models.config_file import ConfigFile
from shared.models.heads.block_size import read_block_size
from shared.tokens import TreeShape

CHAIN_SHAPE = TreeShape(num_steps=3, topk=1, num_draft_tokens=4)
LLAMA_HEAD_SHAPE = TreeShape(num_steps=5, topk=4, num_draft_tokens=8)
MIMO_SHAPE = TreeShape(num_steps=1, topk=1, num_draft_tokens=2)
NGRAM_DRAFT_TOKENS = 12
_WIDE_FAMILIES = ("Llama", "Grok")


def head_shape(target_folder: Path) -> TreeShape:
    """Returns the shape for a draft head of a target: a tree for Llama and Grok, else a chain.

    Raises:
        CheckpointError: the folder has no readable config.json.
    """
    is_wide = _is_of(target_folder, _WIDE_FAMILIES)
    return LLAMA_HEAD_SHAPE if is_wide else CHAIN_SHAPE


def mtp_shape(target_folder: Path) -> TreeShape:
    """Returns the shape for the next-token layers of a target: one step for MiMo, whose layer was
    trained for one, else that of any head.

    Raises:
        CheckpointError: the folder has no readable config.json.
    """
    return MIMO_SHAPE if _is_of(target_folder, ("MiMo",)) else head_shape(target_folder)


def block_shape(block_size: int) -> TreeShape:
    """Returns the chain over a whole block."""
    return TreeShape(num_steps=block_size - 1, topk=1, num_draft_tokens=block_size)


def head_block_size(folder: Path) -> int:
    """Returns the block size a DFlash head was trained with.

    Raises:
        CheckpointError: the folder has no readable config.json, or the size is out of range.
    """
    return read_block_size(ConfigFile.read(folder / "config.json"))


def _is_of(folder: Path, families: tuple[str, ...]) -> bool:
    names = ConfigFile.read(folder / "config.json").texts("architectures")
    return any(name.startswith(families) for name in names)
