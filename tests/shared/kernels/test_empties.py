"""Scratch tensors have their shapes, share no element and begin at aligned places."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.launch import empties


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (4, 4), (0,), (3, 0)])
def test_each_begins_at_an_aligned_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = empties(3, shape, dtype, torch.device("cpu"))
    for number, part in enumerate(parts):
        assert part.shape == shape
        assert part.dtype is dtype
        assert part.is_contiguous()
        assert part.data_ptr() % 16 == 0
        part.fill_(number)
    for number, part in enumerate(parts):
        assert bool((part == torch.tensor(number).to(dtype)).all())
