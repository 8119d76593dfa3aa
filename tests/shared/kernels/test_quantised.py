"""8-bit weights: how far products are off, and what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.kernels.linear import linear
from shared.kernels.quantised import (
    QuantisedWeight,
    largest_elements,
)

STORED = (torch.int8, torch.float8_e4m3fn)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _weight() -> Tensor:
    """Channels of very different size, as in real matrices."""
    return _random(48, 64) * torch.logspace(-4, 3, 48).unsqueeze(1)


def _bound(inputs: Tensor, weight: Tensor, stored: torch.dtype) -> Tensor:
    """Returns `[T, N]`, the most that rounding each element to the nearest can cost.

    int8 is off by half a step of 1/127 of the channel's largest element. e4m3 has 3 bits of
    mantissa, so it is off by 1/16 of the element, or by half its smallest step, 2^-10, near zero.
    """
    largest = weight.abs().amax(dim=1, keepdim=True)
    if stored is torch.int8:
        error = (largest / 254).expand_as(weight)
    else:
        error = torch.maximum(weight.abs() / 16, largest / 448 / 1024)
    return inputs.abs() @ error.T


@pytest.mark.parametrize("stored", STORED)
def test_products_are_within_the_bound_of_rounding(stored: torch.dtype) -> None:
    weight, inputs, bias = _weight(), _random(9, 64, seed=1), _random(48, seed=2)
    product = linear(inputs, QuantisedWeight.of(weight, stored), bias)
    error = (product - (inputs @ weight.T + bias)).abs()
    bound = _bound(inputs, weight, stored)
    slack = 1e-5 * (inputs.abs() @ weight.abs().T + 1.0)
    assert bool((error <= bound + slack).all())
    assert bool((error > bound / 100).any()), "the weights were rounded at all"


@pytest.mark.parametrize("stored", STORED)
def test_one_scale_for_the_whole_matrix_would_break_the_bound(stored: torch.dtype) -> None:
    weight, inputs = _weight(), _random(9, 64, seed=1)
    whole = QuantisedWeight.of(weight.reshape(1, -1), stored).dequantised(torch.float32)
    error = (inputs @ (whole.view_as(weight) - weight).T).abs()
    assert bool((error > _bound(inputs, weight, stored) * 1.01).any())


@pytest.mark.parametrize("stored", STORED)
def test_the_largest_elements_and_channels_of_zeros_are_exact(stored: torch.dtype) -> None:
    weight = torch.tensor([[3.0, -3.0], [0.0, 0.0], [1e-30, 0.0]])
    back = QuantisedWeight.of(weight, stored).dequantised(torch.float32)
    torch.testing.assert_close(back, weight, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", STORED)
def test_half_precision_neither_overflows_nor_changes_type(
    stored: torch.dtype, dtype: torch.dtype
) -> None:
    weight, inputs = _random(8, 4096).to(dtype), torch.full((2, 4096), 8.0, dtype=dtype)
    product = linear(inputs, QuantisedWeight.of(weight, stored), None)
    assert product.dtype is dtype
    exact = inputs.float() @ weight.float().T
    bound = _bound(inputs.float(), weight.float(), stored)
    assert bool(((product.float() - exact).abs() <= bound + 0.01 * exact.abs() + 8.0).all())


@pytest.mark.parametrize("stored", STORED)
def test_a_weight_takes_a_byte_an_element_and_a_scale_a_channel(stored: torch.dtype) -> None:
    quantised = QuantisedWeight.of(_weight(), stored)
    assert quantised.values.nbytes == 48 * 64
    assert quantised.num_saved_bytes == 48 * 64 * 3 - 48 * 4
    assert QuantisedWeight.of(_weight().half(), stored).num_saved_bytes == 48 * 64 - 48 * 4


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN's products")
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("depth", [64, 512, 1280])
def test_rows_do_not_depend_on_their_number(depth: int, stored: torch.dtype) -> None:
    weight = QuantisedWeight.of(_random(96, depth), stored)
    inputs = _random(70, depth, seed=1)
    expected = linear(inputs, weight, None)
    for num_rows in (1, 2, 3, 5, 8, 17, 33):
        assert torch.equal(linear(inputs[:num_rows], weight, None), expected[:num_rows])


def test_every_e4m3_number_is_widened_exactly() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    finite = numbers[(numbers & 0x7F) != 0x7F].view(torch.float8_e4m3fn).unsqueeze(1)
    weight = replace(QuantisedWeight.of(_random(254, 1), torch.float8_e4m3fn), values=finite)
    expected = finite.float() * weight.scales
    assert torch.equal(weight.dequantised(torch.float32), expected)


@pytest.mark.parametrize("stored", STORED)
def test_some_columns_round_as_the_whole_matrix_does(stored: torch.dtype) -> None:
    weight = _weight()
    whole = QuantisedWeight.of(weight, stored)
    half = QuantisedWeight.of(weight[:, :20], stored, largest_elements(weight))
    assert torch.equal(half.dequantised(torch.float32), whole.dequantised(torch.float32)[:, :20])
    alone = QuantisedWeight.of(weight[:, :20], stored).dequantised(torch.float32)
    assert not torch.equal(alone, whole.dequantised(torch.float32)[:, :20])


def test_no_rows_give_no_rows() -> None:
    product = linear(torch.zeros(0, 64), QuantisedWeight.of(_weight(), torch.int8), None)
    assert product.shape == (0, 48)
