"""Experts in 4 bits are read as the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shared.errors import CheckpointError
from shared.models.checkpoint import Checkpoint
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.plain_forward import plain_forward

SHAPE = TinyShape(
    vocab_size=64,
    intermediate_size=64,
    overrides={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
)
NAMES = ("gate_up_proj", "down_proj")


def _pack(folder: Path) -> dict[str, Tensor]:
    """Puts random blocks in place of the experts' matrices; returns what transformers reads."""
    write_checkpoint(folder, "gpt_oss", SHAPE)
    file = folder / "model.safetensors"
    tensors, wholes = load_file(file), {}
    draw = torch.Generator().manual_seed(0)
    for key in [key for key in tensors if key.endswith(NAMES)]:
        num_experts, depth, num_rows = tensors.pop(key).shape
        size = (num_experts, num_rows, depth // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(122, 127, size, generator=draw, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        wholes[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return wholes


def _logits(folder: Path) -> Tensor:
    decoder = load_decoder(folder, dtype=torch.float32, device=torch.device("cpu"))
    return plain_forward(decoder, range(20), range(20)).logits


def test_every_element_is_the_one_transformers_reads(tmp_path: Path) -> None:
    wholes = _pack(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    for key, expected in wholes.items():
        assert torch.equal(checkpoint.read(key).float(), expected)
        assert checkpoint.shape(key) == tuple(expected.shape)


def test_a_model_in_4_bits_computes_what_its_unpacked_copy_does(tmp_path: Path) -> None:
    wholes = _pack(tmp_path)
    packed = _logits(tmp_path)
    file = tmp_path / "model.safetensors"
    others = {key: each for key, each in load_file(file).items() if "_proj_" not in key}
    biases = {key: each for key, each in load_file(file).items() if key.endswith("proj_bias")}
    save_file({**others, **biases, **{k: w.contiguous() for k, w in wholes.items()}}, file)
    assert torch.equal(_logits(tmp_path), packed)


def test_scales_of_another_shape_are_named(tmp_path: Path) -> None:
    _pack(tmp_path)
    file, key = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj_scales"
    tensors = load_file(file)
    save_file(tensors | {key: tensors[key][:, :, :1].contiguous()}, file)
    with pytest.raises(CheckpointError, match=rf"{key} has shape \[1, 32, 1\]"):
        _logits(tmp_path)


def test_scales_that_are_missing_are_named(tmp_path: Path) -> None:
    _pack(tmp_path)
    file, key = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj_scales"
    save_file({name: each for name, each in load_file(file).items() if name != key}, file)
    with pytest.raises(CheckpointError, match=r"lacks .*down_proj"):
        _logits(tmp_path)
