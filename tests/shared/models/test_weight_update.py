"""A decoder whose weights are replaced in place is the decoder that a start would have loaded."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.errors import CheckpointError
from shared.model_options import LoadFormat, ModelOptions, Quantisation
from shared.models.checkpoint import Checkpoint
from shared.models.decoder import Decoder
from shared.models.decoder_weights import DecoderKeys
from shared.models.loader import load_decoder
from shared.models.weight_update import WeightStage, WeightSwap, checksums, named_tensors
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint

CPU = torch.device("cpu")
FAMILIES = (
    "llama",
    "qwen2",
    "gemma3",
    "qwen3_moe",
    "gpt_oss",
    "mixtral",
    "phi3",
    "olmo2",
    "step3p5",
    "qwen3_5",
)
SHAPES = {"qwen3_5": TinyShape(overrides=DELTA)}


def _decoder(
    folder: Path,
    options: ModelOptions = ModelOptions(),  # noqa: B008
    device: torch.device = CPU,
) -> Decoder:
    return load_decoder(folder, dtype=torch.float32, device=device, options=options)


def _place(tensor: torch.Tensor) -> int:
    """Returns where a tensor lies, of packed ones only which it is."""
    return tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)


def _stage(
    decoder: Decoder,
    folder: Path,
    options: ModelOptions = ModelOptions(),  # noqa: B008
) -> WeightStage:
    return WeightStage(decoder, DecoderKeys.of(Checkpoint.open(folder).files), options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_read_in_place_is_the_one_a_start_loads(family: str, tmp_path: Path) -> None:
    check_reading(family, Quantisation.UNQUANT, tmp_path, CPU)
    if family in ("llama", "qwen3_moe"):
        check_reading(family, Quantisation.INT8, tmp_path, CPU)


def check_reading(
    family: str, quantisation: Quantisation, tmp_path: Path, device: torch.device
) -> None:
    """For any device."""
    old, new = tmp_path / "old", tmp_path / "new"
    if not new.exists():
        write_checkpoint(old, family, SHAPES.get(family), seed=1)
        write_checkpoint(new, family, SHAPES.get(family), seed=2)
    options = ModelOptions(quantisation=quantisation)
    decoder = _decoder(old, options, device)
    of_old = checksums(decoder)
    tensors = {name: _place(tensor) for name, tensor in named_tensors(decoder)}
    stage = _stage(decoder, old, options)
    stage.read(new, LoadFormat.AUTO)
    assert stage.names == stage.all_names
    assert checksums(decoder) == of_old, "it is only staged"
    stage.apply()
    assert checksums(decoder) == checksums(_decoder(new, options, device)) != of_old
    assert {name: _place(tensor) for name, tensor in named_tensors(decoder)} == tensors


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_tensors_that_come_by_name_are_put_in_place_one_after_another(
    family: str, tmp_path: Path
) -> None:
    check_adding(family, tmp_path, CPU)


def check_adding(family: str, tmp_path: Path, device: torch.device) -> None:
    """For any device, which the tensors come on."""
    old = write_checkpoint(tmp_path / "old", family, seed=1)
    new = write_checkpoint(tmp_path / "new", family, seed=2)
    decoder, weights = _decoder(old, device=device), load_file(new / "model.safetensors")
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for is_fused in (True, False):
        stage = _stage(decoder, old)
        for name, tensor in weights.items():
            if any(each in name for each in fused) is is_fused:
                stage.add(name, tensor.to(device))
        stage.check_ready()
        assert stage.names < stage.all_names
        stage.apply()
    assert checksums(decoder) == checksums(_decoder(new, device=device))


def test_a_tied_head_follows_its_embedding(tmp_path: Path) -> None:
    shape = TinyShape(tie_word_embeddings=True)
    old = write_checkpoint(tmp_path / "old", "llama", shape, seed=1)
    new = write_checkpoint(tmp_path / "new", "llama", shape, seed=2)
    decoder, stage_of = _decoder(old), _stage
    stage = stage_of(decoder, old)
    embedding = load_file(new / "model.safetensors")["model.embed_tokens.weight"]
    stage.add("model.embed_tokens.weight", embedding)
    stage.add("lm_head.weight", embedding)  # a copy, which says nothing new
    stage.check_ready()
    stage.apply()
    assert torch.equal(decoder.embedding, embedding)
    assert torch.equal(decoder.lm_head.dense(), embedding)


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "old", "llama", seed=1)
    decoder = _decoder(folder)
    before = checksums(decoder)
    stage = _stage(decoder, folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(CheckpointError, match=r"q_proj.weight of the update has shape \[1, 2\]"):
        stage.add(name, torch.zeros(1, 2))
    with pytest.raises(CheckpointError, match=r"has nobody\.knows, which this architecture"):
        stage.add("nobody.knows", torch.zeros(1))
    assert stage.is_empty
    stage.add(name, torch.zeros(32, 32))
    with pytest.raises(CheckpointError, match="came twice"):
        stage.add(name, torch.zeros(32, 32))
    with pytest.raises(CheckpointError, match=r"lacks .*k_proj.weight, .*v_proj.weight"):
        stage.check_ready()
    assert checksums(decoder) == before


@dataclass(frozen=True)
class Box:
    """A model of one weight."""

    config: None
    weight: torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_only_finite_numbers_are_swapped(dtype: torch.dtype) -> None:
    running, new = Box(None, torch.zeros(2).to(dtype)), torch.tensor([1.0, -448.0]).to(dtype)
    WeightSwap(running, Box(None, new)).apply()
    assert torch.equal(running.weight.float(), new.float())
    with pytest.raises(CheckpointError, match="weight holds numbers that are not finite"):
        WeightSwap(running, Box(None, torch.tensor([1.0, torch.nan]).to(dtype)))


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    old = write_checkpoint(tmp_path / "old", "llama", seed=1)
    wider = write_checkpoint(tmp_path / "new", "llama", TinyShape(intermediate_size=64), seed=1)
    stage = _stage(_decoder(old), old)
    with pytest.raises(CheckpointError, match=r"has intermediate_size 64; .* has 48"):
        stage.read(wider, LoadFormat.AUTO)
    cut = tmp_path / "cut"
    shutil.copytree(old, cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        stage.read(cut, LoadFormat.AUTO)
    assert stage.is_empty
