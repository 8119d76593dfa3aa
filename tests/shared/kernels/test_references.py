"""The small reference kernels against their formulas, written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from shared.kernels.linear import LinearWeight, linear
from shared.kernels.pointwise import rms_norm, rotate, rotation_tables, silu_mul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(5, 24).to(dtype), torch.randn(24).to(dtype)
    exact = hidden.double()
    exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    result = rms_norm(hidden, weight, 1e-3)
    assert result.dtype == dtype
    torch.testing.assert_close(
        result.double(), exact, atol=ROUNDING[dtype], rtol=2 * ROUNDING[dtype]
    )


def test_rms_norm_does_not_overflow_half_precision() -> None:
    hidden = torch.full((1, 16), 6e4, dtype=torch.float16)
    assert torch.equal(rms_norm(hidden, torch.ones(16).half(), 1e-6), torch.ones(1, 16).half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_takes_the_gate_first(dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 20).to(dtype)
    gate, up = gate_up.double().split(10, -1)
    exact = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(
        silu_mul(gate_up).double(), exact, atol=ROUNDING[dtype], rtol=2 * ROUNDING[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_turns_pairs_of_halves(dtype: torch.dtype) -> None:
    heads = torch.randn(2, 3, 8).to(dtype)
    angles = torch.rand(2, 4) * math.tau
    pairs = torch.complex(heads[..., :4].double(), heads[..., 4:].double())
    turned = pairs * torch.polar(torch.ones(2, 1, 4).double() * 1.5, angles.double().unsqueeze(1))
    result = rotate(heads, *rotation_tables(angles, 1.5))
    assert result.dtype == dtype
    exact = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(
        result.double(), exact, atol=4 * ROUNDING[dtype], rtol=2 * ROUNDING[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(dtype: torch.dtype, *, has_bias: bool) -> None:
    inputs, weight, bias = torch.randn(5, 12), torch.randn(7, 12), torch.randn(7)
    exact = inputs @ weight.T + (bias if has_bias else 0)
    prepared = LinearWeight.prepare(weight.to(dtype))
    result = linear(inputs.to(dtype), prepared, bias.to(dtype) if has_bias else None)
    assert result.dtype == dtype
    torch.testing.assert_close(
        result.float(), exact, atol=40 * ROUNDING[dtype], rtol=2 * ROUNDING[dtype]
    )


def test_linear_of_no_rows() -> None:
    prepared = LinearWeight.prepare(torch.randn(7, 12))
    assert linear(torch.randn(0, 12), prepared, None).shape == (0, 7)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs packed products")
@pytest.mark.parametrize(
    ("sizes", "is_packed"),
    [
        ((4, 5), False),
        ((32, 258), False),
        ((64, 96), False),
        ((48, 33), False),
        ((172, 64), False),
        ((172, 96), True),
        ((512, 768), True),
        ((1280, 512), True),
        ((2048, 64), True),
    ],
)
def test_rows_of_products_do_not_depend_on_their_number(
    sizes: tuple[int, int], is_packed: bool
) -> None:
    inputs, weight = torch.randn(70, sizes[0]), torch.randn(sizes[1], sizes[0])
    prepared = LinearWeight.prepare(weight)
    assert prepared.is_packed == is_packed
    expected = linear(inputs, prepared, None)
    for num_rows in (1, 2, 3, 5, 8, 17, 33):
        assert torch.equal(linear(inputs[:num_rows], prepared, None), expected[:num_rows])
