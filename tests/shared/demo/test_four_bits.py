"""Conversion of drafts to 4 bits, in the layout that the loaders read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shared.demo.recipe import checkpoint
from shared.demo.recipe.four_bits import GROUP_SIZE, input_moments, to_four_bits, to_words
from shared.demo.recipe.model import Llama, Shape
from shared.models.checkpoint import Checkpoint

DEMO = Path(__file__).parents[3] / "shared" / "demo"
FOLDERS = ("draft", "heads/mtp", "heads/dflash")
SMALL = Shape(
    hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, intermediate=96, vocabulary=128
)


def test_numbers_move_by_a_step_at_most() -> None:
    weight = torch.randn(40, 64) * torch.logspace(-3, 2, 40)[:, None]
    weight[7] = 0
    numbers, scales = to_four_bits(weight)
    assert (int(numbers.min()), int(numbers.max())) == (-8, 7)
    assert scales.shape == (40, 64 // GROUP_SIZE)
    steps = scales.float().repeat_interleave(GROUP_SIZE, 1)
    # The largest numbers are cut off where that serves the rest.
    error = (numbers * steps - weight).abs() / steps.abs()
    assert float(error.median()) < 0.3
    assert float(error.quantile(0.98)) < 1.0
    assert not numbers[7].any()


def test_errors_are_made_up_for_where_inputs_go_together() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 64)
    inputs = torch.randn(512, 8) @ torch.randn(8, 64) + 0.1 * torch.randn(512, 64)

    def error(moments: torch.Tensor | None) -> float:
        numbers, scales = to_four_bits(weight, moments)
        read = numbers * scales.float().repeat_interleave(GROUP_SIZE, 1)
        return float(((inputs @ (read - weight).T) ** 2).mean())

    assert error(inputs.T @ inputs) < 0.5 * error(None)


def test_converted_folder_is_read_as_its_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Llama(SMALL)
    checkpoint.save(model, tmp_path / "source")
    moments = input_moments(model, [range(20), range(20, 50)])
    linear = [f"{k}.weight" for k, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert sorted(moments) == sorted(linear)
    to_words(tmp_path / "source", tmp_path / "small", moments)
    plain, packed = (Checkpoint.open(tmp_path / name) for name in ("source", "small"))
    assert packed.files.keys() == plain.files.keys()
    for key in plain.files:
        weight, read = plain.read(key).float(), packed.read(key).float()
        if weight.ndim == 1:
            assert torch.equal(read, weight)
        else:
            numbers, scales = to_four_bits(weight, moments.get(key))
            steps = scales.float().repeat_interleave(GROUP_SIZE, 1)
            assert torch.equal(read, numbers * steps)
    checkpoint.load(tmp_path / "small", "cpu", torch.float32)


@pytest.mark.parametrize("name", FOLDERS)
def test_demo_matrices_are_in_4_bits(name: str) -> None:
    tensors = load_file(DEMO / name / "model.safetensors")
    words = {key for key, tensor in tensors.items() if tensor.dtype == torch.int32}
    names = {key.removesuffix("_packed") for key in words}
    assert {key for key, tensor in tensors.items() if tensor.ndim == 2} == {
        f"{each}{part}" for each in names for part in ("_packed", "_scale")
    }
    config = json.loads((DEMO / name / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
