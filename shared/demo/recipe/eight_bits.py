"""Brings a checkpoint's matrices to int8, in the layout of compressed-tensors (`int-quantized`).

``python -m shared.demo.recipe.eight_bits FOLDER --out FOLDER``

A matrix ``[N, K]`` becomes int8 with one bfloat16 scale a row, ``weight_scale`` ``[N, 1]``; norms
and biases stay.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.models.checkpoint import Checkpoint

LARGEST = 127

Store = Callable[[str, Tensor], dict[str, Tensor]]
"""What a matrix is stored as, by key."""


def quantization(layout: str, weights: dict[str, object]) -> dict[str, object]:
    """The ``quantization_config`` of a layout of compressed-tensors."""
    of_weights = {
        "type": "int", "symmetric": True, "dynamic": False, "group_size": None,
        "block_structure": None,
    }  # fmt: skip
    group = {
        "targets": ["Linear", "Embedding"], "weights": of_weights | weights,
        "input_activations": None, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": layout,
        "quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": [],
        "kv_cache_scheme": None,
    }  # fmt: skip


def to_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, K]`` as int8 and ``[N, 1]`` scales in bfloat16; a row's largest number sets its own."""
    exact = weight.float()
    peak = exact.abs().amax(1, keepdim=True).clamp(min=1e-8)
    # Numbers are rounded to multiples of the scale as it is stored.
    scales = (peak / LARGEST).to(torch.bfloat16)
    return (exact / scales.float()).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def scaled_rows(key: str, weight: Tensor) -> dict[str, Tensor]:
    """A matrix in 8 bits and its scales."""
    values, scales = to_eight_bits(weight)
    return {key: values, f"{key}_scale": scales}


CHANNELS = quantization("int-quantized", {"num_bits": 8, "strategy": "channel"})


def convert(
    source: Path, folder: Path, store: Store = scaled_rows, layout: dict[str, object] = CHANNELS
) -> None:
    """Writes the weights and the config of ``source`` to ``folder``, and copies its other files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    stored = Checkpoint.open(source)
    for key in stored.files:
        tensor = stored.read(key)
        weights |= store(key, tensor) if tensor.ndim == 2 else {key: tensor}
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for file in source.iterdir():
        if file.is_file() and folder != source:
            shutil.copy(file, folder / file.name, follow_symlinks=False)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": layout}, indent=2) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Bring a checkpoint's matrices to 8 bits.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="may be the folder itself")
    args = parser.parse_args()
    convert(args.folder, args.out)


if __name__ == "__main__":
    main()
