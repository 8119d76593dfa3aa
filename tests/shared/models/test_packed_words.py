"""Integers packed into words are read as the numbers that they stand for, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.draft.training.frozen_target import load_causal_model
from shared.errors import CheckpointError
from shared.model_options import ModelOptions, Quantisation
from shared.models.checkpoint import Checkpoint, Cut
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.plain_forward import plain_forward

SHAPE = TinyShape(tie_word_embeddings=True)
GROUP = 16
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


def words_of(numbers: Tensor, bits: int) -> Tensor:
    """Packs `[N, K]` a number at a time."""
    in_a_word, half = 32 // bits, 2 ** (bits - 1)
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // in_a_word)), np.uint32)
    for (row, column), number in np.ndenumerate(numbers.numpy()):
        shift = np.uint32(bits * (column % in_a_word))
        words[row, column // in_a_word] |= np.uint32(int(number) + half) << shift
    return torch.from_numpy(words.view(np.int32))


def pack(folder: Path, bits: int, *, is_grouped: bool = True) -> dict[str, Tensor]:
    """Puts random words in place of all matrices; returns what they stand for."""
    draw, half = torch.Generator().manual_seed(0), 2 ** (bits - 1)
    packed, meant = {}, {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        packed[key] = meant[key] = tensor
        if tensor.ndim == 2:
            rows, columns = tensor.shape
            numbers = torch.randint(-half, half, tensor.shape, generator=draw)
            scale = torch.rand(rows, columns // GROUP if is_grouped else 1, generator=draw) / half
            del packed[key]
            packed[f"{key}_packed"], packed[f"{key}_scale"] = words_of(numbers, bits), scale
            packed[f"{key}_shape"] = torch.tensor([rows, columns])
            meant[key] = numbers * scale.repeat_interleave(columns // scale.shape[1], 1)
    save_file(packed, folder / "model.safetensors")
    weights = {"num_bits": bits, "symmetric": True, "strategy": "channel"}
    if is_grouped:
        weights |= {"strategy": "group", "group_size": GROUP}
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
    }
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def logits(folder: Path) -> Tensor:
    return logits_of(load_decoder(folder, dtype=torch.float32, device=torch.device("cpu")))


def logits_of(decoder: Decoder) -> Tensor:
    return plain_forward(decoder, range(20), range(20)).logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", shape=SHAPE)


@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_model_computes_what_its_unpacked_copy_does(
    folder: Path, tmp_path: Path, bits: int, is_grouped: bool
) -> None:
    plain = write_checkpoint(tmp_path / "plain", shape=SHAPE)
    save_file(pack(folder, bits, is_grouped=is_grouped), plain / "model.safetensors")
    assert torch.equal(logits(folder), logits(plain))


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_with_a_scale_a_channel_stay_in_8_bits(folder: Path, bits: int) -> None:
    pack(folder, bits, is_grouped=False)
    kept = load_decoder(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        options=ModelOptions(quantisation=Quantisation.INT8),
    )
    assert kept.layouts.keys() == {
        f"layers.{layer}.{name}.weight"
        for layer in range(SHAPE.num_layers)
        for name in ("qkv", "output", "gate_up", "down")
    }
    torch.testing.assert_close(logits_of(kept), logits(folder), rtol=1e-5, atol=1e-5)


def test_experts_may_be_packed(tmp_path: Path) -> None:
    overrides = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    shape = TinyShape(vocab_size=64, num_kv_heads=4, overrides=overrides)
    folder, plain = (
        write_checkpoint(tmp_path / name, "glm4_moe", shape) for name in ("packed", "plain")
    )
    save_file(pack(folder, 4, is_grouped=False), plain / "model.safetensors")
    assert torch.equal(logits(folder), logits(plain))


@pytest.mark.parametrize("cut", [None, Cut(0, 7, 17), Cut(1, 5, 20)])
def test_part_of_a_packed_weight_takes_its_own_numbers_and_scales(
    folder: Path, cut: Cut | None
) -> None:
    meant = pack(folder, 4)[UP_PROJ]
    file = Checkpoint.open(folder).open_file(folder / "model.safetensors")
    assert file.shape(UP_PROJ) == meant.shape
    assert torch.equal(file.read(UP_PROJ, cut), meant if cut is None else meant[cut.slices])


def test_trainer_reads_the_same_numbers(folder: Path) -> None:
    meant = pack(folder, 4)
    read = load_causal_model(folder, torch.float32).state_dict()
    assert all(torch.equal(read[key], tensor) for key, tensor in meant.items())


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("_packed", torch.zeros(48, 5, dtype=torch.int32), r"_packed has shape \[48, 5\]; .*word"),
        ("_packed", torch.zeros(47, 4, dtype=torch.int32), r"_packed has shape \[47, 4\]; .*word"),
        ("_scale", torch.ones(48, 3), r"_scale has shape \[48, 3\]; .* needs \[48, 2\]"),
        ("_scale", None, r"is torch.int8 and .*_scale .*is missing"),
        ("_shape", torch.tensor([48, 31]), r"has shape \[48, 31\]; the config needs \[48, 32\]"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    folder: Path, key: str, change: Tensor | None, message: str
) -> None:
    pack(folder, 4)
    path = folder / "model.safetensors"
    tensors = load_file(path) | {f"{UP_PROJ}{key}": change}
    save_file({name: each for name, each in tensors.items() if each is not None}, path)
    with pytest.raises(CheckpointError, match=message):
        logits(folder)
