"""Brings a checkpoint's matrices to int8, in the layout of compressed-tensors (`int-quantized`).

``python -m shared.demo.recipe.eight_bits FOLDER --out FOLDER``

A matrix ``[N, K]`` becomes int8 with one bfloat16 scale a row, ``weight_scale`` ``[N, 1]``; norms
and biases stay.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST = 127

QUANTIZATION: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "weights": {
                "type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True,
                "dynamic": False, "group_size": None, "block_structure": None,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [],
    "kv_cache_scheme": None,
}  # fmt: skip


def to_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, K]`` as int8 and ``[N, 1]`` scales in bfloat16; a row's largest number sets its own."""
    exact = weight.float()
    peak = exact.abs().amax(1, keepdim=True).clamp(min=1e-8)
    # Numbers are rounded to multiples of the scale as it is stored.
    scales = (peak / LARGEST).to(torch.bfloat16)
    return (exact / scales.float()).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def convert(source: Path, folder: Path) -> None:
    """Writes the weights and the config of ``source`` to ``folder``, and copies its other files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        weights[key] = tensor
        if tensor.ndim == 2:
            weights[key], weights[f"{key}_scale"] = to_eight_bits(tensor)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for file in source.iterdir():
        if file.is_file() and folder != source:
            shutil.copy(file, folder / file.name, follow_symlinks=False)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": QUANTIZATION}, indent=2) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Bring a checkpoint's matrices to 8 bits.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="may be the folder itself")
    args = parser.parse_args()
    convert(args.folder, args.out)


if __name__ == "__main__":
    main()
