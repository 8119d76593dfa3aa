"""Products computed in 8 bits: rounded rows, and the bits of few rows, many, parts and gated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.linear import (
    MOST_FEW_ROWS,
    WORD_BLOCK,
    gated_linear,
    linear,
    linear_partials,
)
from shared.kernels.pointwise import Partials, silu_mul, total_of
from shared.kernels.quantised import QuantisedWeight, StoredMatrix, quantised_rows
from tests.helpers.kernel_device import crossed, kernel_device
from tests.helpers.products import multiplied, product_error, rounding_of

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
DEVICE = kernel_device()
# The interpreter cuts bfloat16 off.
DTYPE = torch.float16 if IS_INTERPRETING else torch.bfloat16
STORED = (torch.int8, torch.float8_e4m3fn)
# Channels that share a scale of 128 columns; None has one a channel.
ROWS = (None, 128, 1)
# Channels and depth: a part of a tile, gates and values, in segments, and of segments that a depth
# of more than 4,096 is cut into with e4m3 although there are many channels.
SIZES = ((70, 128), (256, 384), (200, 1152)) if IS_INTERPRETING else (
    (70, 128), (256, 384), (200, 1152), (6144, 4096), (4096, 14336), (28672, 4096), (28672, 8192),
)  # fmt: skip
FEW = MOST_FEW_ROWS if IS_INTERPRETING else 16
COUNTS = (17, 130) if IS_INTERPRETING else (
    1, 2, 16, 17, 33, 64, 65, 127, 128, 129, 192, 256, 257, 300, 384, 512, 1000,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETING:
        monkeypatch.setattr("shared.kernels.linear.is_hopper", lambda device: True)


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE)


def _spread(count: int) -> Tensor:
    return torch.logspace(-0.5, 0.5, count, device=DEVICE)


def _weight(
    channels: int, depth: int, stored: torch.dtype, block_rows: int | None
) -> QuantisedWeight:
    """Channels and columns of different size, so that no scale can be another's."""
    exact = _random(channels, depth) * _spread(channels).unsqueeze(1) * _spread(depth)
    matrix = StoredMatrix.rounded(exact.to(DTYPE), stored, block_rows=block_rows)
    return QuantisedWeight.kept(matrix)


def _inputs(num_rows: int, depth: int) -> Tensor:
    columns = _spread(depth) / depth**0.5
    return (_random(num_rows, depth, seed=1) * columns * _spread(num_rows).unsqueeze(1)).to(DTYPE)


def _assert_same(found: Tensor, expected: Tensor, stored: torch.dtype) -> None:
    """The same bits, but for the interpreter, whose products of e4m3 are those of a library."""
    if IS_INTERPRETING and stored is torch.float8_e4m3fn:
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=5e-3)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("is_by_block", [False, True])
@pytest.mark.parametrize("depth", [128, 384, 4096, 5120, 14336])
def test_rows_are_rounded_as_by_plain_torch(
    depth: int, is_by_block: bool, stored: torch.dtype
) -> None:
    rows = _inputs(5, depth)
    rows[1] = 0.0
    rows[2, WORD_BLOCK // 2 :] *= 1e-3
    # Half of them are ties between two integers.
    rows[4] = torch.arange(depth, device=DEVICE).remainder(255).sub(127) / 2.0
    rows[4, ::WORD_BLOCK] = 127.0
    values, scales = quantised_rows(rows, stored, is_by_block=is_by_block)
    expected, expected_scales = quantised_rows.plain(rows, stored, is_by_block=is_by_block)
    assert torch.equal(scales, expected_scales)
    assert scales.shape == (depth // WORD_BLOCK if is_by_block else 1, 5)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    alone, _ = quantised_rows(rows[3:4], stored, is_by_block=is_by_block)
    assert torch.equal(alone.view(torch.uint8), values[3:4].view(torch.uint8))


def test_int8_rows_are_within_half_a_step_of_their_largest_element() -> None:
    rows = _inputs(7, 384).float()
    values, scales = quantised_rows.plain(rows, torch.int8, is_by_block=True)
    blocks = rows.view(7, -1, WORD_BLOCK)
    steps = blocks.abs().amax(2, keepdim=True) / 127.0
    error = (values.view_as(blocks) * scales.t().unsqueeze(2) - blocks).abs() / steps
    assert 0.49 < float(error.max()) < 0.5 + 1e-4
    assert int(values.view_as(blocks).abs().amax(2).min()) == 127, "blocks use the whole range"
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantised_rows.plain(halves, torch.int8, is_by_block=False)[0].tolist() == [
        [127, 0, 2, 2, 0, -2]
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("stored", STORED)
def test_a_row_that_is_not_finite_stays_so_and_leaves_others_alone(
    stored: torch.dtype, value: float
) -> None:
    if IS_INTERPRETING and stored is torch.float8_e4m3fn:
        pytest.skip("the interpreter's e4m3 has no NaN")
    rows, weight = _inputs(3, 384), _weight(256, 384, stored, None)
    expected = linear(rows, weight, None)
    rows[1, 7] = value
    with np.errstate(invalid="ignore"):
        found = linear(rows, weight, None)
    assert not bool(found[1].isfinite().any())
    _assert_same(found[[0, 2]], expected[[0, 2]], stored)


@pytest.mark.parametrize(("size", "block_rows", "stored"), crossed(SIZES, ROWS, STORED))
def test_rows_keep_their_bits_in_every_product(
    size: tuple[int, int], block_rows: int | None, stored: torch.dtype
) -> None:
    weight, rows = _weight(*size, stored, block_rows), _inputs(COUNTS[-1], size[1])
    bias = _random(size[0], seed=2).to(DTYPE)
    expanded = weight.dequantised(torch.float32)
    few = torch.split(rows, FEW)
    expected = torch.cat([linear(each, weight, None) for each in few])
    biased = torch.cat([linear(each, weight, bias) for each in few])
    exact = multiplied(rows, weight)
    error = product_error(expected, exact, expanded)
    assert error < rounding_of(weight)
    assert product_error(biased, exact, expanded, bias) < rounding_of(weight)
    assert product_error(expected, rows, expanded) > 2 * error, "rows were rounded"
    for count in COUNTS:
        some, last = rows[:count], rows[-count:]
        _assert_same(linear(some, weight, None), expected[:count], stored)
        _assert_same(linear(last, weight, bias), biased[-count:], stored)
        parts = linear_partials(some, weight)
        _assert_same(total_of(parts), expected[:count], stored)
        if size == (200, 1152) and count < 256:
            assert isinstance(parts, Partials)
        gated = gated_linear(some, weight)
        _assert_same(gated, silu_mul(expected[:count].contiguous()), stored)
    assert not weight.counters.any(), "counters are left as they were"


def test_the_largest_sums_of_int8_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products have one sign, and a segment is as long as sums of 32 bits let it be."""
    if IS_INTERPRETING:
        pytest.skip("takes 8 seconds there")
    monkeypatch.setattr("shared.kernels.linear._MAX_PROGRAMS", 1)
    channels, depth = 64, 2**17
    matrix = torch.full((channels, depth), -128, dtype=torch.int8, device=DEVICE)
    scales = torch.full((channels, 1), 1.0 / 128.0, device=DEVICE)
    weight = QuantisedWeight.kept(StoredMatrix(matrix, scales, DTYPE))
    operand = weight.operand_for(DTYPE)
    assert operand is not None
    assert operand.segments.count == 1
    rows = torch.full((MOST_FEW_ROWS + 1, depth), 2.0**-10, dtype=DTYPE, device=DEVICE)
    for count in (1, len(rows)):
        found = linear(rows[:count], weight, None)
        expected = torch.full_like(found, -(2.0**-10) * depth)
        torch.testing.assert_close(found, expected, rtol=4e-3, atol=0.0)


def test_a_graph_multiplies_what_it_is_given() -> None:
    if IS_INTERPRETING:
        pytest.skip("needs CUDA graphs")
    first, other = (
        _weight(6144, 4096, torch.float8_e4m3fn, None),
        _weight(4096, 6144, torch.int8, 128),
    )
    inputs = _inputs(300, 4096)

    def products() -> Tensor:
        return linear(linear(inputs, first, None), other, None)

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products()
    for seed in (2, 3):
        inputs.copy_(_random(300, 4096, seed=seed) / 64.0)
        graph.replay()
        assert torch.equal(found, products())
