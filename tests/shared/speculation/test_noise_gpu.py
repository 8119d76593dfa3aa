"""Noise has the same bits on a GPU as on the CPU, so drafts and targets may live anywhere."""

from __future__ import annotations

import pytest
import torch

from shared.speculation.distributions import gumbel_noise

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SEEDS = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63), 7], dtype=torch.int64)
POSITIONS = torch.tensor([0, 1, 131_071, 17, 2**33, 4096], dtype=torch.int64)


def test_whole_rows_have_the_same_bits() -> None:
    on_cpu = gumbel_noise(SEEDS, POSITIONS, 128_256)
    on_gpu = gumbel_noise(SEEDS.to(CUDA), POSITIONS.to(CUDA), 128_256).cpu()
    assert torch.equal(on_cpu, on_gpu)


def test_another_seed_gives_other_bits() -> None:
    """The control: equality above is not that of constants."""
    one = gumbel_noise(SEEDS.to(CUDA), POSITIONS.to(CUDA), 256).cpu()
    other = gumbel_noise((SEEDS + 1).to(CUDA), POSITIONS.to(CUDA), 256).cpu()
    assert not torch.equal(one, other)
