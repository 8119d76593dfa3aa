"""Gathered parts are added as float32 and rounded once, in the order of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.exchange import plain_sum

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn_parts(size: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Returns `[size, numel]`, elements of very different sizes."""
    generator = torch.Generator().manual_seed(size)
    exponents = torch.randint(-8, 8, (size, numel), generator=generator).float()
    return (torch.randn(size, numel, generator=generator) * torch.exp2(exponents)).to(dtype)


def exact_sum(parts: Tensor) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gathered_parts_are_rounded_once(size: int, dtype: torch.dtype) -> None:
    parts = drawn_parts(size, 999, dtype)
    total = plain_sum(parts)
    assert total.dtype is dtype
    assert torch.equal(total, exact_sum(parts))


def test_rounding_after_each_addition_is_something_else() -> None:
    parts = drawn_parts(4, 999, torch.bfloat16)
    rounded = parts[0]
    for part in parts[1:]:
        rounded = rounded + part
    assert not torch.equal(plain_sum(parts), rounded)
