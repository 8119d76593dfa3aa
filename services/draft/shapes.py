"""The tree each algorithm grows when no shape is set."""

from __future__ import annotations

from pathlib import Path

from services.draft.algorithm import Algorithm
from shared.models.config_file import ConfigFile
from shared.models.heads.block_size import read_block_size
from shared.tokens import TreeShape

MAX_TREE_DEPTH = 32
CHAIN_SHAPE = TreeShape(num_steps=3, topk=1, num_draft_tokens=4)
LLAMA_HEAD_SHAPE = TreeShape(num_steps=5, topk=4, num_draft_tokens=8)
MIMO_SHAPE = TreeShape(num_steps=1, topk=1, num_draft_tokens=2)
NGRAM_DRAFT_TOKENS = 12
_WIDE_FAMILIES = ("Llama", "Grok")

GivenShape = tuple[int | None, int | None, int | None]
"""Steps, topk and tokens, as far as they are set."""


def completed(given: GivenShape, default: TreeShape, *, is_block: bool) -> TreeShape:
    """Returns the shape that is set, completed as SGLang completes it.

    Args:
        given: a whole shape, nothing, or a part for which `is_completable` holds.
        default: of the algorithm.
        is_block: of a DFLASH head, whose tokens alone are the rows of its block.
    """
    steps, topk, tokens = given
    if is_block and tokens is not None and steps in (None, 1) and topk in (None, 1):
        return _chain(tokens - 1)
    if topk == 1 and not is_block:
        return _chain(steps or (tokens - 1 if tokens else default.num_steps))
    if steps is not None and topk is not None and tokens is not None:
        return TreeShape(steps, topk, tokens)
    return default


def is_completable(given: GivenShape, algorithm: Algorithm) -> bool:
    """Whether what is set names one shape: all, nothing, a chain, or the rows of NGRAM or DFLASH,
    which have flags of their own for the rest."""
    num_set = sum(value is not None for value in given)
    if num_set in (0, 3):
        return True
    if algorithm in (Algorithm.NGRAM, Algorithm.DFLASH):
        return given[:2] == (None, None)
    return given[1] == 1


def completed_ngram(given: GivenShape, max_trie_depth: int, max_breadth: int) -> TreeShape:
    """Returns the shape of n-gram trees, which are as deep and as wide as the trie allows."""
    steps, topk, tokens = given
    if steps is not None and topk is not None and tokens is not None:
        return TreeShape(steps, topk, tokens)
    return TreeShape(
        num_steps=min(max_trie_depth - 1, MAX_TREE_DEPTH),
        topk=max_breadth,
        num_draft_tokens=tokens or min(max_trie_depth, NGRAM_DRAFT_TOKENS),
    )


def _chain(num_steps: int) -> TreeShape:
    return TreeShape(num_steps, 1, num_steps + 1)


def model_shape(
    algorithm: Algorithm, model_folder: Path, target_folder: Path, *, block_size: int | None
) -> TreeShape:
    """Returns the shape of an algorithm that has a model.

    Args:
        block_size: of a DFLASH head; None takes the checkpoint's.

    Raises:
        CheckpointError: a head's shape depends on a config.json that is not readable.
    """
    if algorithm is Algorithm.DFLASH:
        return _block_shape(block_size or _head_block_size(model_folder))
    if algorithm is Algorithm.MTP:
        return _mtp_shape(target_folder)
    return _head_shape(target_folder) if algorithm.reads_features else CHAIN_SHAPE


def _head_shape(target_folder: Path) -> TreeShape:
    """A tree for heads of Llama and Grok, else a chain."""
    is_wide = _is_of(target_folder, _WIDE_FAMILIES)
    return LLAMA_HEAD_SHAPE if is_wide else CHAIN_SHAPE


def _mtp_shape(target_folder: Path) -> TreeShape:
    """One step for MiMo, whose layer was trained for one, else that of any head."""
    return MIMO_SHAPE if _is_of(target_folder, ("MiMo",)) else _head_shape(target_folder)


def _block_shape(block_size: int) -> TreeShape:
    """The chain over a whole block."""
    return TreeShape(num_steps=block_size - 1, topk=1, num_draft_tokens=block_size)


def _head_block_size(folder: Path) -> int:
    return read_block_size(ConfigFile.read(folder / "config.json"))


def _is_of(folder: Path, families: tuple[str, ...]) -> bool:
    names = ConfigFile.read(folder / "config.json").texts("architectures")
    return any(name.startswith(families) for name in names)
