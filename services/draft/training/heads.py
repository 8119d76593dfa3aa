"""Building, writing and reading heads of every algorithm."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.draft.training.block_head import BlockHead
from services.draft.training.frozen_target import FrozenTarget
from services.draft.training.head_shape import Algorithm, HeadShape, head_config
from services.draft.training.recurrent_head import (
    Eagle3CutHead,
    Eagle3Head,
    MtpHead,
    RecurrentHead,
    build_recurrent,
)
from shared.errors import CheckpointError
from shared.models.checkpoint import Checkpoint

SHAPE_FILE = "training_shape.json"
WEIGHTS_FILE = "model.safetensors"

Head = RecurrentHead | BlockHead


def build_head(shape: HeadShape, token_ids: Sequence[int] | None = None) -> Head:
    """Returns a freshly initialised head; `token_ids` see `build_recurrent`."""
    if shape.algorithm is Algorithm.DFLASH:
        return BlockHead(shape)
    return build_recurrent(shape, token_ids)


def begin_from_target(head: Head, target: FrozenTarget) -> None:
    """Gives the last norm of a head the target's weight, and an lm_head the target's rows."""
    with torch.no_grad():
        match head:
            case Eagle3Head():
                head.norm.weight.copy_(target.final_norm)
            case MtpHead():
                head.final_norm.weight.copy_(target.final_norm)
            case BlockHead():
                head.norm.weight.copy_(target.final_norm)
        if isinstance(head, Eagle3CutHead):
            head.lm_head.weight.copy_(head.select(target.lm_head.to(head.d2t.device)))


def save_head(head: Head, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes `config.json` and `model.safetensors` in the format of published heads."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(head, head.state_dict(), folder, dtype)
    config = head_config(head.shape) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / SHAPE_FILE).write_text(json.dumps(head.shape.as_json(), indent=2) + "\n")


def save_weights(
    head: Head,
    weights: Mapping[str, Tensor],
    folder: Path,
    dtype: torch.dtype,
    kept: Collection[str] = (),
) -> None:
    """Writes `model.safetensors` alone.

    Args:
        weights: by the names of the head's parameters and buffers.
        kept: names of those that keep every bit.
    """
    tensors = {}
    for key, value in weights.items():
        plain = value.detach().cpu().contiguous()
        if plain.is_floating_point():
            tensors[f"{head.prefix}{key}"] = plain if key in kept else plain.to(dtype)
        else:
            tensors[key] = plain
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_head(folder: Path) -> Head:
    """Reads what `save_head` wrote, in float32 on the CPU.

    Raises:
        CheckpointError: a file is missing, or does not fit the shape.
    """
    try:
        shape = HeadShape.from_json(json.loads((folder / SHAPE_FILE).read_text()))
        checkpoint = Checkpoint.open(folder)
        tensors = {key: checkpoint.read(key) for key in checkpoint.files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} holds no trained head: {error}") from error
    head = build_head(shape, _token_ids(tensors))
    named = {key.removeprefix(head.prefix): tensor for key, tensor in tensors.items()}
    try:
        head.load_state_dict(named)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE}: {error}") from error
    return head.eval()


def _token_ids(tensors: dict[str, Tensor]) -> list[int] | None:
    offsets = tensors.get("d2t")
    return None if offsets is None else (offsets + torch.arange(len(offsets))).tolist()
