"""Matrices that a checkpoint has in 8 bits stay so, and models compute what they do when these are
widened."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import CheckpointError
from shared.kernels.quantised import QuantisedWeight
from shared.layers.experts import Experts
from shared.layers.linear import Linear, named_parts, num_saved_bytes
from shared.layers.tensor_group import TensorGroup
from shared.model_options import LoadFormat, ModelOptions, Quantisation
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.decoder_weights import DecoderKeys
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder, read_decoder
from shared.models.scaled_weights import ScaleBlock
from shared.models.shard import WHOLE, Shard
from shared.models.weight_update import WeightStage, checksums
from shared.models.weights import WeightPart, read_weights, scales_of, stays_stored
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.mtp_heads import TinyMtp, write_mtp
from tests.helpers.plain_forward import plain_forward
from tests.helpers.thread_groups import thread_groups
from tests.shared.models.test_scaled_weights import compressed, edit_config

CPU = torch.device("cpu")
TOKENS = range(3, 23)
QKV, DOWN = "layers.0.qkv.weight", "layers.0.down.weight"
SELF_ATTENTION = "model.layers.0.self_attn."
Pack = Callable[[Tensor], tuple[Tensor, Tensor]]

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
DEEPSEEK = EXPERTS | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT: dict[str, Any] = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
}
WIDE = TinyShape(vocab_size=64, hidden_size=128, num_layers=2, head_dim=64, intermediate_size=256)
FAMILIES = {
    "qwen3": WIDE,
    "qwen3_moe": replace(WIDE, overrides=EXPERTS),
    "deepseek_v3": replace(WIDE, num_kv_heads=4, overrides=DEEPSEEK | LATENT),
}
# Other ways in which matrices are made of a checkpoint's; sizes that fill no block.
ODD = TinyShape(vocab_size=64, hidden_size=136, num_layers=3, head_dim=40, intermediate_size=200)
ODD_EXPERTS = DEEPSEEK | {"moe_intermediate_size": 72}
STRANGE = {
    "phi3": ODD,
    "qwen2": ODD,
    "gemma3": ODD,
    "mixtral": replace(ODD, overrides={"num_local_experts": 4}),
    "glm4_moe": replace(ODD, overrides=ODD_EXPERTS),
    "qwen3_next": replace(
        ODD,
        overrides=DELTA
        | EXPERTS
        | {"moe_intermediate_size": 72, "shared_expert_intermediate_size": 72},
    ),
    "llama4": replace(
        ODD,
        overrides={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 200,
            "interleave_moe_layer_step": 2,
        },
    ),
}


def _e4m3_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of very different size, so that none can be another's."""
    shape = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    scales = torch.exp2(torch.randn(*shape, generator=torch.Generator().manual_seed(3)))
    return weight.to(torch.float8_e4m3fn), scales


def _e4m3_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 200
    return (weight / scales).to(torch.float8_e4m3fn), scales.to(torch.bfloat16)


def _e4m3_tensors(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax() / 200
    return (weight / scale).to(torch.float8_e4m3fn), scale


def _int8_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1) / 100
    return (weight / scales[:, None]).round().to(torch.int8), scales


def _int8_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax() / 100 * torch.ones(len(weight), -(-weight.shape[1] // 128))
    scales *= torch.linspace(0.5, 2.0, scales.numel()).view_as(scales)
    return (weight / scales.amax() * 2.0).round().to(torch.int8), scales


# With measured scales of activations and of the KV cache, which are not read.
STATIC = "FP8 tensors"
LAYOUTS: dict[str, tuple[dict[str, Any], str, Pack, Quantisation]] = {
    "block FP8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "_scale_inv",
        _e4m3_blocks,
        Quantisation.FP8,
    ),
    "FP8 channels": (
        compressed("float-quantized", strategy="channel"),
        "_scale",
        _e4m3_channels,
        Quantisation.FP8,
    ),
    STATIC: (
        compressed("float-quantized", strategy="tensor"),
        "_scale",
        _e4m3_tensors,
        Quantisation.FP8,
    ),
    "int8 channels": (
        compressed(strategy="channel"),
        "_scale",
        _int8_channels,
        Quantisation.INT8,
    ),
    "int8 groups": (
        compressed(strategy="group", group_size=128),
        "_scale",
        _int8_groups,
        Quantisation.INT8,
    ),
}
KINDS = tuple(LAYOUTS)


def pack_folder(folder: Path, layout: str) -> Path:
    """Brings the matrices to 8 bits that published checkpoints have so."""
    config, suffix, pack, _ = LAYOUTS[layout]
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in [*tensors.items()]:
        if tensor.ndim == 2 and any(part in key for part in ("_proj", ".experts.")):
            tensors[key], tensors[f"{key}{suffix}"] = pack(tensor)
            if layout == STATIC:
                tensors[f"{key.removesuffix('.weight')}.input_scale"] = torch.tensor(0.5)
    if layout == STATIC:
        for kind in "k", "v":
            tensors[f"{SELF_ATTENTION}{kind}_scale"] = torch.ones(1)
            tensors[f"{SELF_ATTENTION}{kind}_proj.output_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, config)
    return folder


def packed_folder(path: Path, family: str, layout: str, seed: int = 0) -> Path:
    """Writes a checkpoint of one of `FAMILIES` or `STRANGE` in one of `LAYOUTS`."""
    shape = (FAMILIES | STRANGE)[family]
    return pack_folder(write_checkpoint(path, family, shape, seed=seed), layout)


def _load(folder: Path, quantisation: Quantisation, group: TensorGroup | None = None) -> Decoder:
    options = ModelOptions(quantisation=quantisation)
    return load_decoder(folder, dtype=torch.float32, device=CPU, options=options, group=group)


def _logits(decoder: Decoder) -> Tensor:
    return plain_forward(decoder, TOKENS, range(len(TOKENS))).logits


def _wide_matrices(decoder: Decoder) -> set[str]:
    """Returns the linear layers that are not in 8 bits, by their places in a layer."""
    named = named_parts(decoder.layers, Linear)
    return {
        name.split(".", 2)[2]
        for name, each in named
        if not isinstance(each.weight, QuantisedWeight)
    }


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_widened_model(family: str, layout: str, tmp_path: Path) -> None:
    folder, quantisation = packed_folder(tmp_path, family, layout), LAYOUTS[layout][3]
    wide, kept = _load(folder, Quantisation.UNQUANT), _load(folder, quantisation)
    assert num_saved_bytes(wide) == 0
    assert num_saved_bytes(kept) > 0
    assert _wide_matrices(kept) <= {"mlp.router.weight"}
    torch.testing.assert_close(_logits(kept), _logits(wide), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["FP8 channels", "int8 channels", "block FP8"])
@pytest.mark.parametrize("family", STRANGE)
def test_matrices_of_any_size_and_order_of_rows_stay(
    family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside stacks of experts, which are wide."""
    folder = packed_folder(tmp_path, family, layout)
    wide = _load(folder, Quantisation.UNQUANT)
    monkeypatch.setattr("shared.models.loader.stays_stored", lambda *_: lambda *_: True)
    kept = _load(folder, Quantisation.UNQUANT)
    assert kept.layouts
    torch.testing.assert_close(_logits(kept), _logits(wide), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize(
    ("family", "cut"),
    [
        *((family, cut) for family in FAMILIES for cut in ("tp 2", "pp 2")),
        ("qwen3_moe", "ep 2"),
        ("deepseek_v3", "ep 2"),
    ],
)
def test_parts_add_up_to_the_widened_model(
    family: str, layout: str, cut: str, tmp_path: Path
) -> None:
    folder, quantisation = packed_folder(tmp_path, family, layout), LAYOUTS[layout][3]
    groups = thread_groups(*((1, 2) if cut == "pp 2" else (2, 1)))
    groups = [each.spreading(experts=cut == "ep 2", sequences=False) for each in groups]
    with ThreadPoolExecutor(2) as threads:
        decoders = [*threads.map(partial(_load, folder, quantisation), groups)]
        assert all(_wide_matrices(each) <= {"mlp.router.weight"} for each in decoders)
        found = [*threads.map(_logits, decoders)]
    expected = _logits(_load(folder, Quantisation.UNQUANT))
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-4)


def test_values_and_scales_are_the_files(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, "qwen3_moe", "block FP8")
    file, decoder = load_file(folder / "model.safetensors"), _load(folder, Quantisation.FP8)
    layer = decoder.layers[0]
    assert isinstance(layer.mlp, Experts)
    down = layer.mlp.down.experts[2]
    key = "model.layers.0.mlp.experts.2.down_proj.weight"
    assert isinstance(down, QuantisedWeight)
    assert torch.equal(down.values.view(torch.uint8), file[key].view(torch.uint8))
    assert torch.equal(down.scales, file[f"{key}_scale_inv"])
    gate_up = layer.mlp.gate_up.experts[3]
    key = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert isinstance(gate_up, QuantisedWeight)
    assert torch.equal(gate_up.values[256:].view(torch.uint8), file[key].view(torch.uint8))
    assert torch.equal(gate_up.scales[2:], file[f"{key}_scale_inv"])


def _tensors(folder: Path, quantisation: Quantisation, shard: Shard = WHOLE) -> dict[str, Tensor]:
    return read_decoder(
        Checkpoint.open(folder),
        ModelConfig.from_folder(folder),
        shard,
        dtype=torch.bfloat16,
        device=CPU,
        stays=stays_stored(quantisation, torch.bfloat16, CPU),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_wide_is_read_of_what_stays(family: str, tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, family, "block FP8")
    tensors = _tensors(folder, Quantisation.FP8)
    wide = {name for name, each in tensors.items() if each.ndim == 2 and each.itemsize == 2}
    inner = {name.split(".", 2)[-1] for name in wide}
    assert inner == {"embedding", "lm_head"} | (
        {"expand"} if family == "deepseek_v3" else set()
    ) | ({"router.weight"} if family != "qwen3" else set())
    file = load_file(folder / "model.safetensors")
    expand = sum(each.nbytes for name, each in tensors.items() if name.endswith("expand"))
    read_bytes = sum(each.nbytes for each in tensors.values())
    assert read_bytes - expand / 2 < sum(each.nbytes for each in file.values())


def test_a_device_without_such_products_gets_wide_matrices(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, "qwen3", "block FP8")
    assert {each.dtype for each in _tensors(folder, Quantisation.UNQUANT).values()} == {
        torch.bfloat16
    }


def test_other_8_bits_than_those_asked_for_are_rounded_anew(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, "qwen3", "block FP8")
    decoder = _load(folder, Quantisation.INT8)
    assert not decoder.layouts
    weight = decoder.layers[0].attention.output.weight  # type: ignore[attr-defined]
    assert weight.values.dtype is torch.int8


def test_a_device_with_such_products_keeps_depths_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.kernels.linear.is_hopper", lambda device: True)
    shape = replace(WIDE, intermediate_size=200)
    folder = pack_folder(write_checkpoint(tmp_path, "qwen3", shape), "block FP8")
    tensors = _tensors(folder, Quantisation.UNQUANT)
    assert tensors[QKV].dtype is torch.float8_e4m3fn
    assert tensors[DOWN].dtype is torch.bfloat16, "200 columns"
    file = load_file(folder / "model.safetensors")
    gate_up = tensors["layers.0.gate_up.weight"]
    assert torch.equal(
        gate_up[200:].view(torch.uint8),
        file["model.layers.0.mlp.up_proj.weight"].view(torch.uint8),
    )
    # The second matrix begins within a block, so that each row has scales of its own.
    scales = tensors[scales_of("layers.0.gate_up.weight")]
    own = file["model.layers.0.mlp.up_proj.weight_scale_inv"]
    assert torch.equal(scales[200:], own.repeat_interleave(128, 0)[:200])


def test_columns_that_are_cut_within_a_block_are_widened(tmp_path: Path) -> None:
    shape = replace(WIDE, intermediate_size=384)
    folder = pack_folder(write_checkpoint(tmp_path, "qwen3", shape), "block FP8")
    for rank in (0, 1):
        tensors = _tensors(folder, Quantisation.FP8, Shard(rank, 2))
        assert tensors[DOWN].dtype is torch.bfloat16, "192 columns"
        assert tensors[QKV].dtype is torch.float8_e4m3fn


def test_matrices_that_are_only_partly_in_8_bits_are_widened_whole(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, "qwen3", "block FP8")
    path = folder / "model.safetensors"
    file = load_file(path)
    key = f"{SELF_ATTENTION}k_proj.weight"
    del file[f"{key}_scale_inv"]
    file[key] = file[key].float()
    save_file(file, path)
    tensors = _tensors(folder, Quantisation.FP8)
    assert tensors[QKV].dtype is torch.bfloat16
    assert tensors["layers.1.qkv.weight"].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("is_whole", [True, False])
def test_rows_that_change_places_take_their_scales_along(is_whole: bool, tmp_path: Path) -> None:
    """Blocks as a whole, as in fused projections of linear attention, or rows of two of them."""
    order = (
        (*range(128, 256), *range(128)) if is_whole else (128, *range(1, 128), 0, *range(129, 256))
    )
    values = torch.randn(512, 128).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    save_file({"m.weight": values, "m.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    config = {"quantization_config": LAYOUTS["block FP8"][0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = read_weights(
        Checkpoint.open(tmp_path),
        [WeightPart("m.weight", (512, 128), "m", row_order=order, may_stay=True)],
        dtype=torch.float32,
        device=CPU,
        stays=lambda *_: True,
    )
    rows = torch.tensor([*order, *(256 + row for row in order)])
    assert torch.equal(tensors["m"].view(torch.uint8), values.view(torch.uint8)[rows])
    wanted = torch.tensor([[2.0], [1.0], [4.0], [3.0]]) if is_whole else scales[rows // 128]
    assert torch.equal(tensors[scales_of("m")], wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_that_begin_with_a_block_keep_the_scales_of_blocks(
    family: str, tmp_path: Path
) -> None:
    folder = packed_folder(tmp_path, family, "block FP8")
    blocks = {layout.block for layout in _load(folder, Quantisation.FP8).layouts.values()}
    assert blocks == {ScaleBlock(128, 128)}


def test_blocks_that_no_product_takes_are_widened(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", WIDE)
    file = load_file(folder / "model.safetensors")
    for key in [each for each in file if "_proj" in each]:
        file[key] = file[key].to(torch.float8_e4m3fn)
        shape = file[key].shape
        file[f"{key}_scale_inv"] = torch.ones(shape[0] // 64, shape[1] // 64)
    save_file(file, folder / "model.safetensors")
    edit_config(folder, {"quant_method": "fp8", "weight_block_size": [64, 64]})
    assert not _load(folder, Quantisation.FP8).layouts


@pytest.mark.parametrize("quantisation", [Quantisation.UNQUANT, Quantisation.FP8])
def test_scales_of_a_wrong_shape_are_named(quantisation: Quantisation, tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, "qwen3", "block FP8")
    path = folder / "model.safetensors"
    key = f"{SELF_ATTENTION}o_proj.weight_scale_inv"
    save_file(load_file(path) | {key: torch.ones(3, 1)}, path)
    with pytest.raises(
        CheckpointError, match=rf"{key} has shape \[3, 1\]; .* \[128, 256\] needs \[1, 2\] or \[1\]"
    ):
        _load(folder, quantisation)


def test_one_scale_serves_all_blocks_and_channels(tmp_path: Path) -> None:
    for layout, name in (("block FP8", "_scale_inv"), ("FP8 channels", "_scale")):
        folder = packed_folder(tmp_path / name, "qwen3", layout)
        path = folder / "model.safetensors"
        key = f"{SELF_ATTENTION}q_proj.weight{name}"
        save_file(load_file(path) | {key: torch.tensor(0.5)}, path)
        kept, wide = _load(folder, Quantisation.FP8), _load(folder, Quantisation.UNQUANT)
        assert QKV in kept.layouts
        torch.testing.assert_close(_logits(kept), _logits(wide), rtol=1e-5, atol=1e-5)


# Updates.


def _stage(decoder: Decoder, folder: Path, quantisation: Quantisation) -> WeightStage:
    keys = DecoderKeys.of(Checkpoint.open(folder).files)
    return WeightStage(decoder, keys, ModelOptions(quantisation=quantisation))


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_read_in_place_is_the_one_a_start_loads(
    family: str, layout: str, tmp_path: Path
) -> None:
    quantisation = LAYOUTS[layout][3]
    old, new = (packed_folder(tmp_path / str(seed), family, layout, seed) for seed in (1, 2))
    decoder = _load(old, quantisation)
    stage = _stage(decoder, old, quantisation)
    stage.read(new, LoadFormat.AUTO)
    assert stage.names == stage.all_names
    stage.check_ready()
    stage.apply()
    assert checksums(decoder) == checksums(_load(new, quantisation))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_wide_update_is_rounded_to_the_8_bits_that_are_served(
    family: str, layout: str, by_name: bool, tmp_path: Path
) -> None:
    quantisation = LAYOUTS[layout][3]
    decoder = _load(packed_folder(tmp_path / "old", family, layout), quantisation)
    new = write_checkpoint(tmp_path / "new", family, FAMILIES[family], seed=2)
    stage = _stage(decoder, new, quantisation)
    if by_name:
        for name, tensor in load_file(new / "model.safetensors").items():
            stage.add(name, tensor)
    else:
        stage.read(new, LoadFormat.AUTO)
    stage.check_ready()
    stage.apply()
    exact = _load(new, Quantisation.UNQUANT)
    own, right = decoder.layers[1].attention, exact.layers[1].attention
    for name in ("qkv", "output"):
        matrix, meant = getattr(own, name).dense(), getattr(right, name).dense()
        largest = meant.abs().max()
        error = (matrix - meant).abs().max() / largest
        assert 0.0 < float(error) < 0.04
    difference = _logits(decoder) - _logits(exact)
    assert float(difference.norm() / _logits(exact).norm()) < 0.2


# Next-token layers.


def test_next_token_layers_stay_in_8_bits(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path, TinyMtp(style="mimo", num_layers=1))
    file = load_file(folder / "model.safetensors")
    meant = dict(file)
    for key in [each for each in file if each.endswith("_proj.weight") and "mtp" in each]:
        file[key], file[f"{key}_scale"] = _e4m3_channels(file[key])
        meant[key] = file[key].float() * file[f"{key}_scale"].float()
    save_file(file, folder / "model.safetensors")
    edit_config(folder, LAYOUTS["FP8 channels"][0])
    head = load_mtp(
        folder,
        TargetFolder(folder, dtype=torch.float32, device=CPU),
        dtype=torch.float32,
        device=CPU,
        options=ModelOptions(quantisation=Quantisation.FP8),
    )
    [layer] = head.layers
    projections = [key for key in meant if "mtp" in key and key.endswith("o_proj.weight")]
    [output] = projections
    assert torch.equal(layer.attention.output.dense(), meant[output])  # type: ignore[attr-defined]
    [fused] = [key for key in meant if ("mtp" in key and "input_proj" in key) or "eh_proj" in key]
    assert torch.equal(layer.projection.dense(), meant[fused])  # type: ignore[attr-defined]
