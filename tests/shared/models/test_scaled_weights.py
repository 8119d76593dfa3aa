"""Weights stored in 8 bits are read as the numbers that they stand for, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.draft.training.frozen_target import load_causal_model
from shared.errors import CheckpointError
from shared.model_options import ModelOptions, Quantisation
from shared.models.checkpoint import Checkpoint, Cut
from shared.models.config_file import ConfigFile
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.models.scaled_weights import ScaleBlock, scale_block, spread_scales
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.plain_forward import plain_forward

CPU = torch.device("cpu")
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
Pack = Callable[[Tensor], tuple[Tensor, Tensor]]

EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "glm4_moe": EXPERTS,
    "deepseek_v3": EXPERTS
    | {
        "head_dim": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}


def compressed(layout: str = "int-quantized", **weights: object) -> dict[str, object]:
    """Returns the `quantization_config` of weights alone."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
    }


def per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale.to(torch.bfloat16)


def per_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax() / 127
    return (weight / scale).round().to(torch.int8), scale


def e4m3_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale.view(1)


def e4m3_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def per_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 12 x 8, which do not divide all weights."""
    scale = torch.rand(-(-weight.shape[0] // 12), -(-weight.shape[1] // 8)) + 0.5
    return weight.to(torch.float8_e4m3fn), scale


LAYOUTS: dict[str, tuple[dict[str, Any], str, Pack]] = {
    "channel": (compressed(strategy="channel"), "_scale", per_channel),
    "tensor": (compressed("naive-quantized", strategy="tensor"), "_scale", per_tensor),
    "block": (
        compressed("float-quantized", strategy="block", block_structure=[12, 8]),
        "_scale",
        per_block,
    ),
    "block FP8": ({"quant_method": "fp8", "weight_block_size": [12, 8]}, "_scale_inv", per_block),
    "FP8": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", e4m3_tensor),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", e4m3_tensor),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "_scale", e4m3_channel),
}


def pack_folder(folder: Path, layout: str, *, has_own_file: bool = False) -> dict[str, Tensor]:
    """Brings all matrices of a folder to 8 bits; returns what the weights stand for now."""
    config, suffix, pack = LAYOUTS[layout]
    packed, scales, meant = {}, {}, {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        packed[key] = meant[key] = tensor
        if tensor.ndim == 2:
            packed[key], scales[f"{key}{suffix}"] = pack(tensor)
            meant[key] = expanded(packed[key], scales[f"{key}{suffix}"])
    write_files(folder, packed, scales, has_own_file=has_own_file)
    edit_config(folder, config)
    return meant


def expanded(weight: Tensor, scale: Tensor) -> Tensor:
    if scale.ndim == 2 and scale.shape[1] > 1:
        rows, columns = weight.shape
        scale = scale.repeat_interleave(12, 0)[:rows].repeat_interleave(8, 1)[:, :columns]
    return weight.float() * scale.float()


def write_files(
    folder: Path, packed: dict[str, Tensor], scales: dict[str, Tensor], *, has_own_file: bool
) -> None:
    if not has_own_file:
        save_file(packed | scales, folder / "model.safetensors")
        return
    (folder / "model.safetensors").unlink()
    save_file(packed, folder / "weights.safetensors")
    save_file(scales, folder / "scales.safetensors")
    places = dict.fromkeys(packed, "weights.safetensors")
    places |= dict.fromkeys(scales, "scales.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def edit_config(folder: Path, quantisation: object) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"quantization_config": quantisation}
    path.write_text(json.dumps(values))


def edit_weights(folder: Path, **changes: Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | {f"{UP_PROJ}{key}": tensor for key, tensor in changes.items()}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path)


def load(folder: Path, options: ModelOptions | None = None) -> Decoder:
    return load_decoder(folder, dtype=torch.float32, device=CPU, options=options or ModelOptions())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", shape=TinyShape(tie_word_embeddings=True))


@pytest.mark.parametrize("has_own_file", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decoder_of_8_bits_equals_that_of_the_same_numbers(
    folder: Path, tmp_path: Path, layout: str, has_own_file: bool
) -> None:
    plain = write_checkpoint(tmp_path / "plain", shape=TinyShape(tie_word_embeddings=True))
    save_file(pack_folder(folder, layout, has_own_file=has_own_file), plain / "model.safetensors")
    read, expected = load(folder), load(plain)
    assert torch.equal(read.embedding, expected.embedding)
    for layer, same in zip(read.layers, expected.layers, strict=True):
        assert torch.equal(layer.attention.qkv.dense(), same.attention.qkv.dense())
        assert torch.equal(layer.mlp.gate_up.dense(), same.mlp.gate_up.dense())
        assert torch.equal(layer.mlp.down.dense(), same.mlp.down.dense())
        assert torch.equal(layer.mlp_norm.weight, same.mlp_norm.weight)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", ["channel", "block FP8"])
def test_experts_and_latent_attention_of_8_bits_compute_with_the_same_numbers(
    family: str, layout: str, tmp_path: Path
) -> None:
    shape = TinyShape(vocab_size=64, num_kv_heads=4, overrides=MIXTURES[family])
    folder, plain = (
        write_checkpoint(tmp_path / name, family, shape) for name in ("packed", "plain")
    )
    save_file(pack_folder(folder, layout), plain / "model.safetensors")
    read, expected = (
        plain_forward(load(each), range(20), range(20)).logits for each in (folder, plain)
    )
    assert torch.equal(read, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cut", [Cut(0, 7, 17), Cut(1, 5, 20)])
def test_part_of_a_weight_takes_its_own_scales(folder: Path, layout: str, cut: Cut) -> None:
    meant = pack_folder(folder, layout)
    checkpoint = Checkpoint.open(folder)
    part = checkpoint.open_file(checkpoint.files[UP_PROJ]).read(UP_PROJ, cut)
    assert torch.equal(part, meant[UP_PROJ][cut.slices])


@pytest.mark.parametrize("quantisation", [Quantisation.INT8, Quantisation.FP8])
def test_layers_may_be_quantised_on_top(folder: Path, quantisation: Quantisation) -> None:
    meant = pack_folder(folder, "channel")
    decoder = load(folder, ModelOptions(quantisation=quantisation))
    down = decoder.layers[1].mlp.down.dense()
    expected = meant["model.layers.1.mlp.down_proj.weight"]
    # Per channel, int8 finds the numbers and the scales that were stored.
    assert torch.equal(down, expected) is (quantisation is Quantisation.INT8)
    torch.testing.assert_close(down, expected, rtol=0.07, atol=0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_reads_the_same_numbers(folder: Path, layout: str) -> None:
    meant = pack_folder(folder, layout)
    read = load_causal_model(folder, torch.float32).state_dict()
    assert read.keys() - meant.keys() == {"lm_head.weight"}
    assert all(torch.equal(read[key], tensor) for key, tensor in meant.items())
    assert torch.equal(read["lm_head.weight"], meant["model.embed_tokens.weight"])


@pytest.mark.parametrize("layout", ["channel", "block"])
def test_scales_of_a_wrong_shape_are_named(folder: Path, layout: str) -> None:
    pack_folder(folder, layout)
    edit_weights(folder, _scale=torch.ones(3, 1))
    need = r"\[48, 1\]" if layout == "channel" else r"\[4, 4\]"
    with pytest.raises(
        CheckpointError,
        match=rf"safetensors: {UP_PROJ}_scale has shape \[3, 1\]; .* \[48, 32\] needs {need}",
    ):
        load(folder)


def test_missing_scales_are_named(folder: Path) -> None:
    pack_folder(folder, "channel")
    edit_weights(folder, _scale=None)
    with pytest.raises(CheckpointError, match=rf"is torch.int8 and {UP_PROJ}_scale or .* missing"):
        load(folder)


def test_scales_of_a_weight_that_is_not_in_8_bits_are_refused(folder: Path) -> None:
    edit_weights(folder, _scale=torch.ones(48, 1))
    with pytest.raises(CheckpointError, match=rf"is torch.float32 and has {UP_PROJ}_scale"):
        load(folder)


def test_scales_without_a_weight_are_unexpected(folder: Path) -> None:
    edit_weights(folder, _other_scale=torch.ones(1))
    with pytest.raises(CheckpointError, match=rf"does not use: {UP_PROJ}_other_scale"):
        load(folder)


def test_index_that_names_the_wrong_file_of_scales_is_refused(folder: Path) -> None:
    pack_folder(folder, "channel", has_own_file=True)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][f"{UP_PROJ}_scale"] = "weights.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"weights.safetensors lacks {UP_PROJ}_scale"):
        load(folder)


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "awq"}, r"quant_method of quantization_config is 'awq'; supported: comp"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"quant_algo .* 'NVFP4'; .*: FP8"),
        (compressed("marlin-24"), r"format of .* is 'marlin-24'; supported: int-quantized"),
        (compressed(num_bits=4), r"num_bits of .* is 4; supported: 8"),
        (compressed("pack-quantized", num_bits=3), r"num_bits of .* is 3; supported: 4, 8"),
        (compressed(symmetric=False), r"symmetric of .* is False"),
        (compressed(strategy="token"), r"strategy of .* is 'token'; supported: tensor, channel"),
        ({"quant_method": "fp8", "weight_block_size": [0, 8]}, r"\[0, 8\] share a scale"),
        ("int8", r"quantization_config is 'int8'; it must be an object"),
    ],
)
def test_other_quantisations_are_named(folder: Path, quantisation: object, message: str) -> None:
    edit_config(folder, quantisation)
    with pytest.raises(CheckpointError, match=rf"config.json: {message}"):
        load(folder)


def test_groups_of_columns_are_blocks_of_one_row() -> None:
    values = {"quantization_config": compressed(strategy="group", group_size=4)}
    assert scale_block(ConfigFile(Path("config.json"), values)) == ScaleBlock(1, 4)


def test_groups_that_share_scales_in_different_ways_are_refused() -> None:
    values = compressed(strategy="channel")
    values["config_groups"] = {
        "a": {"weights": {"strategy": "channel"}},
        "b": {"weights": {"strategy": "group", "group_size": 4}},
    }
    config = ConfigFile(Path("config.json"), {"quantization_config": values})
    with pytest.raises(CheckpointError, match="config_groups have different blocks"):
        scale_block(config)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_serves_all(shape: tuple[int, ...]) -> None:
    factors = spread_scales(torch.full(shape, 2.0), (6, 4), None)
    assert factors is not None
    assert torch.equal(factors.expand(6, 4), torch.full((6, 4), 2.0))
