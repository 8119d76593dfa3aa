"""Products that keep the bits of their rows: against float64, in parts, gated, and with company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.linear import (
    MOST_FEW_ROWS,
    LinearWeight,
    can_be_batch_invariant,
    gated_linear,
    linear,
    linear_partials,
)
from shared.kernels.pointwise import Partials, silu_mul, total_of
from tests.helpers.kernel_device import kernel_device
from tests.helpers.products import ROUNDING, product_error

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
DEVICE = kernel_device()
DTYPES = (torch.float16, torch.bfloat16)
# Channels and depth; cut along the depth where there is some.
SIZES = ((64, 128), (70, 256), (130, 1152)) if IS_INTERPRETING else (
    (64, 128), (70, 256), (200, 1152), (6144, 4096), (4096, 14336), (28672, 4096),
)  # fmt: skip
COUNTS = (1, 17) if IS_INTERPRETING else (1, 2, 16, 17, 32, 33, 63, 64)
# Of every tiling of many rows, whole and cut.
MANY = (65, 129, 193, 300) if IS_INTERPRETING else (
    65, 96, 127, 128, 129, 160, 192, 193, 255, 256, 257, 300, 384, 432, 512, 576, 1000, 2049,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _steady_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does what Hopper does."""
    if IS_INTERPRETING:
        monkeypatch.setattr("shared.kernels.linear.is_hopper", lambda device: True)


def _case(channels: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, LinearWeight]:
    generator = torch.Generator(DEVICE).manual_seed(channels + depth)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device=DEVICE)  # noqa: E731
    weight = draw(channels, depth).to(dtype)
    assert can_be_batch_invariant(weight)
    inputs = draw(MOST_FEW_ROWS, depth) / depth**0.5
    return inputs.to(dtype), LinearWeight.prepare(weight)


def _assert_same(found: Tensor, expected: Tensor) -> None:
    """The same bits, but for the interpreter, whose products are those of a library."""
    if IS_INTERPRETING:
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_few_rows_keep_their_bits(size: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, weight = _case(*size, dtype)
    expected = linear(inputs, weight, None)
    assert product_error(expected, inputs, weight.values) < ROUNDING[dtype]
    for num_rows in COUNTS:
        _assert_same(linear(inputs[:num_rows], weight, None), expected[:num_rows])
        _assert_same(linear(inputs[-num_rows:], weight, None), expected[-num_rows:])
    assert weight.counters is not None
    assert not weight.counters.any(), "counters are left as they were"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_parts_add_up_to_the_product(size: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, weight = _case(*size, dtype)
    has_parts = False
    for num_rows in COUNTS:
        rows = inputs[:num_rows]
        found, expected = linear_partials(rows, weight), linear(rows, weight, None)
        if isinstance(found, Partials):
            has_parts = True
            assert found.shape == expected.shape
            found = found.total()
        assert torch.equal(found, expected)
    assert has_parts == (size[1] >= 1024 and size[0] < 28672)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gated_products_are_those_of_two_kernels(size: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, weight = _case(*size, dtype)
    for num_rows in COUNTS:
        rows = inputs[:num_rows]
        _assert_same(gated_linear(rows, weight), silu_mul(linear(rows, weight, None)))


def _many(channels: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, LinearWeight, Tensor]:
    """Returns many rows, a weight, and the products of the rows, a few at a time."""
    few, weight = _case(channels, depth, dtype)
    generator = torch.Generator(DEVICE).manual_seed(depth)
    order = torch.randint(len(few), (MANY[-1],), generator=generator, device=DEVICE)
    rows = (few * torch.linspace(0.5, 1.5, len(few), device=DEVICE, dtype=dtype)[:, None])[order]
    some = [linear(each, weight, None) for each in rows.split(MOST_FEW_ROWS)]
    return rows, weight, torch.cat(some)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_many_rows_have_the_bits_of_few(size: tuple[int, int], dtype: torch.dtype) -> None:
    rows, weight, expected = _many(*size, dtype)
    assert product_error(expected, rows, weight.values) < ROUNDING[dtype]
    for num_rows in MANY:
        _assert_same(linear(rows[:num_rows], weight, None), expected[:num_rows])
        _assert_same(linear(rows[-num_rows:], weight, None), expected[-num_rows:])
        parts = linear_partials(rows[:num_rows], weight)
        _assert_same(total_of(parts), expected[:num_rows])
        gated = gated_linear(rows[:num_rows], weight)
        _assert_same(gated, silu_mul(expected[:num_rows].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_have_the_bits_of_few_with_a_bias(dtype: torch.dtype) -> None:
    rows, weight, _ = _many(*SIZES[2], dtype)
    bias = torch.linspace(-1, 1, SIZES[2][0], device=DEVICE, dtype=dtype)
    some = [linear(each, weight, bias) for each in rows.split(MOST_FEW_ROWS)]
    for num_rows in MANY:
        _assert_same(linear(rows[:num_rows], weight, bias), torch.cat(some)[:num_rows])


def test_many_rows_may_lie_apart() -> None:
    """Columns of a wider tensor: where the copy engine takes their addresses, and where not."""
    rows, weight, expected = _many(*SIZES[1], torch.float16)
    for first, width in ((8, 272), (0, 256 + 4), (1, 257)):
        wider = rows.new_zeros(len(rows), width)
        apart = wider[:, first : first + rows.shape[1]]
        apart.copy_(rows)
        _assert_same(linear(apart, weight, None), expected)
