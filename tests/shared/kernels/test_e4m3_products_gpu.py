"""Products computed in e4m3: rounded rows, and the bits of few rows, many, parts and gated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.linear import MOST_FEW_ROWS, WORD_BLOCK
from shared.kernels.pointwise import Partials, silu_mul, total_of
from shared.kernels.quantised import (
    QuantisedWeight,
    StoredMatrix,
    quantised_gated,
    quantised_linear,
    quantised_partials,
    quantised_rows,
)
from tests.helpers.kernel_device import kernel_device
from tests.helpers.products import E4M3_ROUNDING, multiplied, product_error

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
DEVICE = kernel_device()
# The interpreter cuts bfloat16 off.
DTYPE = torch.float16 if IS_INTERPRETING else torch.bfloat16
# Channels that share a scale of 128 columns; None has one a channel.
ROWS = (None, 128, 1)
# Channels and depth: a part of a tile, gates and values, in segments, and of segments that a depth
# of more than 4,096 is cut into although there are many channels.
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


def _weight(channels: int, depth: int, block_rows: int | None) -> QuantisedWeight:
    """Channels and columns of different size, so that no scale can be another's."""
    exact = _random(channels, depth) * _spread(channels).unsqueeze(1) * _spread(depth)
    matrix = StoredMatrix.rounded(exact.to(DTYPE), torch.float8_e4m3fn, block_rows=block_rows)
    return QuantisedWeight.kept(matrix)


def _inputs(num_rows: int, depth: int) -> Tensor:
    columns = _spread(depth) / depth**0.5
    return (_random(num_rows, depth, seed=1) * columns * _spread(num_rows).unsqueeze(1)).to(DTYPE)


def _assert_same(found: Tensor, expected: Tensor) -> None:
    """The same bits, but for the interpreter, whose products are those of a library."""
    if IS_INTERPRETING:
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=5e-3)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("is_by_block", [False, True])
@pytest.mark.parametrize("depth", [128, 384, 4096, 5120, 14336])
def test_rows_are_rounded_as_by_plain_torch(depth: int, is_by_block: bool) -> None:
    rows = _inputs(5, depth)
    rows[1] = 0.0
    rows[2, WORD_BLOCK // 2 :] *= 1e-3
    values, scales = quantised_rows(rows, is_by_block=is_by_block)
    expected, expected_scales = quantised_rows.plain(rows, is_by_block=is_by_block)
    assert torch.equal(scales, expected_scales)
    assert scales.shape == (depth // WORD_BLOCK if is_by_block else 1, 5)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    alone, _ = quantised_rows(rows[3:4], is_by_block=is_by_block)
    assert torch.equal(alone.view(torch.uint8), values[3:4].view(torch.uint8))


def test_a_row_that_is_not_finite_stays_so_and_leaves_others_alone() -> None:
    if IS_INTERPRETING:
        pytest.skip("the interpreter's e4m3 has no NaN")
    rows, weight = _inputs(3, 384), _weight(256, 384, None)
    expected = quantised_linear(rows, weight, None)
    rows[1, 7] = float("nan")
    found = quantised_linear(rows, weight, None)
    assert bool(found[1].isnan().all())
    _assert_same(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("block_rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_rows_keep_their_bits_in_every_product(
    size: tuple[int, int], block_rows: int | None
) -> None:
    weight, rows = _weight(*size, block_rows), _inputs(COUNTS[-1], size[1])
    bias = _random(size[0], seed=2).to(DTYPE)
    expanded = weight.dequantised(torch.float32)
    few = torch.split(rows, FEW)
    expected = torch.cat([quantised_linear(each, weight, None) for each in few])
    biased = torch.cat([quantised_linear(each, weight, bias) for each in few])
    exact = multiplied(rows, weight)
    error = product_error(expected, exact, expanded)
    assert error < E4M3_ROUNDING
    assert product_error(biased, exact, expanded, bias) < E4M3_ROUNDING
    assert product_error(expected, rows, expanded) > 2 * error, "rows were rounded"
    for count in COUNTS:
        some, last = rows[:count], rows[-count:]
        _assert_same(quantised_linear(some, weight, None), expected[:count])
        _assert_same(quantised_linear(last, weight, bias), biased[-count:])
        parts = quantised_partials(some, weight)
        _assert_same(total_of(parts), expected[:count])
        if size == (200, 1152) and count < 256:
            assert isinstance(parts, Partials)
        gated = quantised_gated(some, weight)
        _assert_same(gated, silu_mul(expected[:count].contiguous()))
    assert not weight.counters.any(), "counters are left as they were"


def test_a_graph_multiplies_what_it_is_given() -> None:
    if IS_INTERPRETING:
        pytest.skip("needs CUDA graphs")
    first, other = _weight(6144, 4096, None), _weight(4096, 6144, 128)
    inputs = _inputs(300, 4096)

    def products() -> Tensor:
        return quantised_linear(quantised_linear(inputs, first, None), other, None)

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products()
    for seed in (2, 3):
        inputs.copy_(_random(300, 4096, seed=seed) / 64.0)
        graph.replay()
        assert torch.equal(found, products())
