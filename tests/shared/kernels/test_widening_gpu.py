"""Products of many rows with int8 weights that are widened in memory, piece by piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.kernels import quantised
from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.quantised import QuantisedWeight, StoredMatrix, quantised_linear
from tests.helpers.kernel_device import kernel_device
from tests.helpers.products import ROUNDING, product_error

# Channels that share a scale of 128 columns; None has one a channel.
ROWS = (None, 128, 1)
# bfloat16 is widened in assembler.
DTYPES = (torch.float16,) if IS_INTERPRETING else (torch.float16, torch.bfloat16)
# A part of a block, pieces of which the last is shorter, and more elements than a program takes.
SIZES = ((70, 128), (300, 384), (200, 1152))
LARGE = () if IS_INTERPRETING else ((6144, 4096), (28672, 4096), (4096, 14336))
MANY_ROWS = 9 if IS_INTERPRETING else 600


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETING:
        monkeypatch.setattr("shared.kernels.linear.is_hopper", lambda device: True)
    monkeypatch.setattr(quantised, "_MAX_REGISTER_ROWS", MANY_ROWS - 1)
    monkeypatch.setattr(quantised, "_PIECE_BYTES", 2**17 if IS_INTERPRETING else 2**23)


def _random(*shape: int, seed: int = 0) -> Tensor:
    device = kernel_device()
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def _weight(size: tuple[int, int], rows: int | None, dtype: torch.dtype) -> QuantisedWeight:
    """Channels and columns of very different size, so that no scale can be another's."""
    channels, depth = size
    exact = _random(*size) * torch.logspace(-1, 1, channels, device=kernel_device()).unsqueeze(1)
    exact *= torch.logspace(-0.5, 0.5, depth, device=kernel_device())
    return QuantisedWeight.kept(StoredMatrix.rounded(exact.to(dtype), torch.int8, block_rows=rows))


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [*SIZES, *LARGE])
def test_pieces_are_widened_to_the_bits_of_plain_torch(
    size: tuple[int, int], dtype: torch.dtype, rows: int | None
) -> None:
    weight = _weight(size, rows, dtype)
    expected, first = weight.dequantised(dtype), 0
    for piece in weight.pieces():
        count = len(piece.values)
        wide = torch.full((count + 1, size[1]), 7.0, dtype=dtype, device=expected.device)
        piece.widen_into(wide[:count])
        assert torch.equal(wide[:count], expected[first : first + count])
        assert bool((wide[count] == 7.0).all()), "nothing is written past the end"
        first += count
    assert first == size[0]


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [*SIZES, *LARGE])
def test_products_are_those_of_the_stored_numbers(
    size: tuple[int, int], dtype: torch.dtype, rows: int | None
) -> None:
    weight = _weight(size, rows, dtype)
    expanded = weight.dequantised(torch.float32)
    inputs, bias = _random(MANY_ROWS, size[1], seed=1).to(dtype), _random(size[0], seed=2).to(dtype)
    assert weight.is_widened(len(inputs))
    for own in (None, bias):
        found = quantised_linear(inputs, weight, own)
        assert (found.dtype, found.is_contiguous()) == (dtype, True)
        assert product_error(found, inputs, expanded, own) < ROUNDING[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
def test_a_graph_multiplies_what_it_is_given(rows: int | None) -> None:
    sizes = (6144, 4096), (4096, 6144)
    first, other = (_weight(size, rows, torch.bfloat16) for size in sizes)
    inputs = _random(MANY_ROWS, 4096, seed=1).bfloat16()

    def products() -> Tensor:
        return quantised_linear(quantised_linear(inputs, first, None), other, None)

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products()
    for seed in (2, 3):
        inputs.copy_(_random(MANY_ROWS, 4096, seed=seed))
        graph.replay()
        assert torch.equal(found, products())


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_takes_a_piece_beside_its_result(has_bias: bool) -> None:
    weight = _weight((6144, 4096), 128, torch.bfloat16)
    inputs = _random(2048, 4096, seed=1).bfloat16()
    bias = _random(6144, seed=2).bfloat16() if has_bias else None
    quantised_linear(inputs, weight, bias)  # makes the library's workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = quantised_linear(inputs, weight, bias)
    taken = torch.cuda.max_memory_allocated() - before
    assert 0 < weight.num_widened_bytes < 2 * 2**23
    assert result.nbytes < taken <= result.nbytes + weight.num_widened_bytes + 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
def test_rows_keep_their_bits_where_that_is_asked_for(rows: int | None) -> None:
    weight = _weight((4096, 4096), rows, torch.bfloat16)
    inputs = _random(MANY_ROWS, 4096, seed=1).bfloat16()
    few = quantised_linear(inputs[:8], weight, None)
    steady = quantised_linear(inputs, replace(weight, is_batch_invariant=True), None)
    assert torch.equal(steady[:8], few)
    assert not torch.equal(quantised_linear(inputs, weight, None), steady), "the library's bits"
