"""Products with 8-bit weights on CUDA, and with the expanded ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.linear import LinearWeight, linear
from shared.kernels.quantised import QuantisedWeight
from tests.helpers.products import ROUNDING, multiplied, rounding_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
STORED = (torch.int8, torch.float8_e4m3fn)
DTYPES = (torch.bfloat16, torch.float16)
# Channels and depth: of an 8B model's four products, and sizes that fill no tile.
SIZES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (200, 1152), (70, 128))


def _case(
    channels: int, depth: int, dtype: torch.dtype, stored: torch.dtype
) -> tuple[Tensor, QuantisedWeight, Tensor]:
    generator = torch.Generator(CUDA).manual_seed(channels + depth)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device=CUDA)  # noqa: E731
    weight = draw(channels, depth) * torch.logspace(-2, 2, channels, device=CUDA).unsqueeze(1)
    inputs = draw(300, depth).to(dtype)
    return inputs, QuantisedWeight.of(weight.to(dtype), stored), draw(channels).to(dtype)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_products_are_those_of_the_expanded_weight(
    size: tuple[int, int], dtype: torch.dtype, stored: torch.dtype
) -> None:
    inputs, weight, bias = _case(*size, dtype, stored)
    expanded = weight.dequantised(torch.float32).double()
    for num_rows in (1, 7, 33, 129, 300):
        rows = inputs[:num_rows]
        exact = multiplied(rows, weight).double() @ expanded.T + bias.double()
        product = linear(rows, weight, bias)
        assert product.dtype is dtype
        # Channels are of very different size, so each is measured by its own.
        size = (rows.double().norm(dim=1, keepdim=True) * expanded.norm(dim=1)).clamp_min(1e-9)
        error = (product.double() - exact).abs() / (size + bias.double().abs())
        assert float(error.max()) < rounding_of(weight), num_rows
    assert not weight.counters.any(), "counters are left as they were"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_products_of_whole_weights_keep_their_rows_bits(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs, quantised, bias = _case(*size, dtype, torch.int8)
    weight = LinearWeight.prepare(quantised.dequantised(dtype))
    assert weight.counters is not None
    expected = linear(inputs, weight, bias)
    exact = inputs.double() @ weight.values.double().T + bias.double()
    scale = inputs.double().norm(dim=1, keepdim=True) * weight.values.double().norm(dim=1)
    error = (expected.double() - exact).abs() / (scale + bias.double().abs())
    assert float(error.max()) < ROUNDING[dtype]
    for num_rows in (1, 2, 16, 17, 48, 64, 65, 128, 129, 256, 257):
        assert torch.equal(linear(inputs[:num_rows], weight, bias), expected[:num_rows]), num_rows
        assert torch.equal(linear(inputs[-num_rows:], weight, bias), expected[-num_rows:])
    assert not weight.counters.any()
