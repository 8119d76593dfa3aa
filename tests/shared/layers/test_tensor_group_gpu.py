"""Sum, residual and norm of a group of GPUs in one kernel have the bits of NCCL's way."""

from __future__ import annotations

import pytest
import torch

from shared.layers.tensor_group import TensorGroup
from tests.helpers.gpu_ranks import run_ranks
from tests.helpers.norm_sums import wrong_norms

SIZE, LIMIT_S = 2, 120.0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason=f"needs {SIZE} GPUs"),
]


def have_equal_bits(group: TensorGroup, device: torch.device) -> bool:
    """One rank: for 1 to 512 rows, in graphs replayed in any order, and for 10,000 sums."""
    if group.slots is None:
        return False
    wrong = list(wrong_norms(group, device))
    print("\n".join(wrong), flush=True)
    return not wrong


def test_one_kernel_has_the_bits_of_nccls_way() -> None:
    assert run_ranks(have_equal_bits, size=SIZE, limit_s=LIMIT_S) == [0] * SIZE
