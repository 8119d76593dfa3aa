"""Conversion of checkpoints to 8 bits, in the layout that the loaders read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.demo.recipe.eight_bits import convert, to_eight_bits
from shared.models.checkpoint import Checkpoint
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import write_checkpoint

DEMO = Path(__file__).parents[3] / "shared" / "demo"
FOLDERS = ("target", "heads/eagle", "heads/eagle3")


def test_numbers_move_by_half_a_step_at_most() -> None:
    weight = torch.randn(40, 64) * torch.logspace(-3, 2, 40)[:, None]
    weight[7] = 0
    values, scales = to_eight_bits(weight)
    assert values.dtype == torch.int8
    assert scales.shape == (40, 1)
    # A scale that bfloat16 rounds down cuts off less than half a step of the largest number.
    error = (values * scales.float() - weight).abs()
    assert bool((error <= 0.76 * scales.float()).all())
    assert not values[7].any()


def test_converted_folder_loads_and_keeps_norms(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", with_tokenizer=True)
    convert(source, tmp_path / "small")
    plain, packed = load_file(source / "model.safetensors"), Checkpoint.open(tmp_path / "small")
    assert packed.files.keys() == plain.keys()
    assert packed.scales.keys() == {key for key, tensor in plain.items() if tensor.ndim == 2}
    for key, tensor in plain.items():
        torch.testing.assert_close(packed.read(key), tensor, atol=0.01, rtol=0)
        assert tensor.ndim == 2 or torch.equal(packed.read(key), tensor)
    assert (tmp_path / "small" / "tokenizer.json").is_file()
    load_decoder(tmp_path / "small", dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.mark.parametrize("name", FOLDERS)
def test_demo_matrices_are_in_8_bits(name: str) -> None:
    tensors = load_file(DEMO / name / "model.safetensors")
    scales = {key for key in tensors if key.endswith("_scale")}
    matrices = {key for key, tensor in tensors.items() if tensor.ndim == 2} - scales
    assert {tensors[key].dtype for key in matrices} == {torch.int8}
    assert scales == {f"{key}_scale" for key in matrices}
    config = json.loads((DEMO / name / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
