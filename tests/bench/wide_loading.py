"""Wide models made while they are loaded, on the device, from a folder that holds no weights.

A 32B in bfloat16 is a file of 65 GB, which takes minutes to write and to read. Its tensors are
copies of a small model's parts, so the folder says which model and which sizes, and the loaders of
target and draft, replaced for the life of the process, widen what they read. Everything else is
what it is with a checkpoint of that size: config, pool, graphs, forwards.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from services.draft.drafters import model_factory
from services.target import engine_factory
from shared.layers.tensor_group import TensorGroup
from shared.model_options import LoadFormat, ModelOptions
from shared.models.checkpoint import Checkpoint
from shared.models.decoder import Decoder
from shared.models.decoder_weights import decoder_parts
from shared.models.heads import target_tensors
from shared.models.heads.target_tensors import TargetFolder, TargetTensors
from shared.models.loader import load_decoder
from shared.telemetry.start_up import start_phase
from tests.bench.wide_model import SPARE_TOKEN, WideModel, WideShape
from tests.bench.wide_tensors import WideTensors

WIDENING_FILE = "widening.json"
_OPEN = Checkpoint.open


def describe(folder: Path, source: Path, shape: WideShape) -> WideModel:
    """Makes `folder` one that is loaded as a wide copy of the model in `source`.

    Raises:
        CannotWiden: the sizes do not fit.
        CheckpointError: `source` cannot be read.
    """
    model = WideModel(source, shape, spare_token=SPARE_TOKEN, device=torch.device("cpu"))
    model.write_without_weights(folder, dtype=torch.bfloat16)
    description = {"source": str(source.resolve()), "shape": asdict(shape)}
    (folder / WIDENING_FILE).write_text(json.dumps(description, indent=2))
    return model


def described(folder: Path, device: torch.device) -> WideModel | None:
    """Returns the model that a folder describes; None for any other folder."""
    path = folder / WIDENING_FILE
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    shape = WideShape(**content["shape"])
    return WideModel(Path(content["source"]), shape, spare_token=SPARE_TOKEN, device=device)


def load_wide_decoder(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
    group: TensorGroup | None = None,
    vocab_size: int = 0,
    **others: Any,
) -> Decoder:
    """Does what `load_decoder` does, also for a folder that describes a wide model, which has its
    own vocabulary and nothing to show of progress."""
    model = described(folder, device)
    if model is None:
        return load_decoder(
            folder,
            dtype=dtype,
            device=device,
            options=options,
            group=group,
            vocab_size=vocab_size,
            **others,
        )
    assert others.get("vocabulary") is None, "a wide model has one tokenizer"
    assert vocab_size in (0, model.config.vocab_size), f"{vocab_size} tokens"
    with start_phase("weights"):
        decoder = model.decoder(dtype=dtype, options=options, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return decoder


def open_wide_target(folder: Path, *, dtype: torch.dtype, device: torch.device) -> TargetTensors:
    """Does what `TargetFolder` does, also for a folder that describes a wide model."""
    model = described(folder, device)
    if model is None:
        return TargetFolder(folder, dtype=dtype, device=device)
    return WideTensors(model, dtype)


def open_wide_checkpoint(folder: Path, load_format: LoadFormat = LoadFormat.AUTO) -> Checkpoint:
    """Does what `Checkpoint.open` does; of a folder that describes a wide model it has the keys
    alone."""
    model = described(folder, torch.device("meta"))
    if model is None:
        return _OPEN(folder, load_format)
    files = {part.key: folder / WIDENING_FILE for part in decoder_parts(model.config)}
    return Checkpoint(folder, files, {}, None, {}, {})


def load_wide_models() -> None:
    """Replaces the loaders of target and drafts in this process."""
    Checkpoint.open = staticmethod(open_wide_checkpoint)  # type: ignore[assignment,method-assign]
    for factory in (engine_factory, model_factory):
        factory.load_decoder = load_wide_decoder  # type: ignore[attr-defined]
    target_tensors.TargetFolder = open_wide_target  # type: ignore[assignment,misc]
