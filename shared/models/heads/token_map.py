"""FR-Spec token maps: the frequent tokens a head is confined to.

Source: Zhao et al., arXiv 2502.14856, section 3.2.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.models.checkpoint import open_weights


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """Returns `[Vd]` int64: the target's id of each draft id.

    Args:
        path: `.json` with a list, `.safetensors` with one tensor, or anything that `torch.save`
            wrote of a list or a tensor.
        vocab_size: of the target.

    Raises:
        CheckpointError: the file cannot be read, or its ids are not distinct and in
            `[0, vocab_size)`.
    """
    token_ids = _as_tensor(path, _read(path))
    if token_ids.ndim != 1 or token_ids.numel() == 0:
        raise CheckpointError(f"{path} has shape {list(token_ids.shape)}; it must be a list of ids")
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        token = low if low < 0 else high
        raise CheckpointError(f"{path} holds id {token}; ids must be in [0, {vocab_size})")
    num_distinct = len(set(token_ids.tolist()))
    if num_distinct != len(token_ids):
        raise CheckpointError(
            f"{path} has {len(token_ids)} ids, of which {num_distinct} are distinct; all must be"
        )
    return token_ids


def _read(path: Path) -> object:
    if path.suffix == ".safetensors":
        weights = open_weights(path)
        keys = sorted(weights.keys())
        if len(keys) != 1:
            raise CheckpointError(f"{path} holds {len(keys)} tensors; a token map is 1")
        return weights.read(keys[0])
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _as_tensor(path: Path, content: object) -> Tensor:
    if isinstance(content, Tensor) and not content.is_floating_point():
        return content.to(torch.int64)
    if isinstance(content, list) and all(type(item) is int for item in content):
        return torch.tensor(content, dtype=torch.int64)
    raise CheckpointError(f"{path} holds {type(content).__name__}; it must be a list of token ids")
