"""Rotary frequencies equal those of transformers for every scaling scheme."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shared.layers.rotary import RopeConfig, RopeScaling, Rotary

CPU = torch.device("cpu")
HEAD_DIM = 64
POSITIONS = torch.tensor([0, 1, 7, 100, 1023, 5000, 20_000])
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[RopeScaling, dict[str, Any]] = {
    RopeScaling.NONE: {},
    RopeScaling.LINEAR: {"factor": 2.5},
    RopeScaling.LLAMA3: LLAMA3,
    RopeScaling.YARN: {"factor": 4.0, "attention_factor": 1.25},
}


@pytest.mark.parametrize("scaling", CASES)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_tables_equal_transformers(scaling: RopeScaling, theta: float) -> None:
    parameters = CASES[scaling]
    original = {"original_max_position_embeddings": 1024} if parameters else {}
    if scaling is RopeScaling.LINEAR:
        original = {}
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=HEAD_DIM,
            max_position_embeddings=32_768,
            rope_parameters={
                "rope_type": scaling.value,
                "rope_theta": theta,
                **original,
                **parameters,
            },
        )
    )
    expected_cos, expected_sin = reference(torch.ones(1), POSITIONS[None])
    rotary = Rotary(RopeConfig(theta, scaling, original_length=1024, **parameters), HEAD_DIM, CPU)
    cos, signed_sin = rotary.tables(POSITIONS)
    half = HEAD_DIM // 2
    sin = torch.cat((-signed_sin[..., :half], signed_sin[..., half:]), -1)
    # One unit in the last place of a frequency is 2e-3 radians at position 20,000.
    torch.testing.assert_close(cos[:, 0], expected_cos[0], atol=3e-3, rtol=0)
    torch.testing.assert_close(sin[:, 0], expected_sin[0], atol=3e-3, rtol=0)


def test_dynamic_frequencies_depend_on_the_own_position_alone() -> None:
    config = RopeConfig(10_000.0, RopeScaling.DYNAMIC, factor=2.0, original_length=64)
    rotary = Rotary(config, HEAD_DIM, CPU)
    together = rotary.tables(torch.tensor([3, 63, 64, 200]))[0]
    for index, position in enumerate((3, 63, 64, 200)):
        assert torch.equal(rotary.tables(torch.tensor([position]))[0][0], together[index])


def test_dynamic_scaling_starts_at_the_original_length() -> None:
    plain = Rotary(RopeConfig(10_000.0), HEAD_DIM, CPU)
    config = RopeConfig(10_000.0, RopeScaling.DYNAMIC, factor=2.0, original_length=64)
    dynamic = Rotary(config, HEAD_DIM, CPU)
    inside, beyond = torch.tensor([10, 63]), torch.tensor([100])
    torch.testing.assert_close(dynamic.tables(inside)[0], plain.tables(inside)[0])
    assert not torch.allclose(dynamic.tables(beyond)[0], plain.tables(beyond)[0], atol=1e-2)
