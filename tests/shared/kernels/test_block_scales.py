"""Weights that came in 8 bits with a scale a block: kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.experts import (
    ExpertWeight,
    expert_product,
    gated_product,
    tiles_of,
)
from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.linear import linear
from shared.kernels.pointwise import Activation, gate_mul
from shared.kernels.quantised import QuantisedWeight, StoredMatrix
from tests.helpers.kernel_device import crossed, kernel_device
from tests.helpers.products import multiplied, product_error, rounded_rows, rounding_of

STORED = (torch.int8, torch.float8_e4m3fn)
NUM_EXPERTS, NUM_CHOSEN = 5, 2
# Of a scale: 128 channels, or 1.
ROWS = (128, 1)
# bfloat16 is widened in assembler.
DTYPES = (torch.float16,) if IS_INTERPRETING else (torch.float16, torch.bfloat16)
# Channels and depth: a part of a block, several, and in segments of the depth.
SIZES = ((70, 128), (256, 384), (200, 1152))
LARGE = () if IS_INTERPRETING else ((2112, 7168), (7168, 2048), (4096, 7168))


def _device() -> torch.device:
    return kernel_device() if torch.cuda.is_available() else torch.device("cpu")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(_device())


def _matrix(
    channels: int, depth: int, stored: torch.dtype, rows: int, dtype: torch.dtype, count: int = 1
) -> StoredMatrix:
    """Scales of very different size, so that none can be another's."""
    size = 30.0 if stored is torch.int8 else 1.0
    values = _random(count * channels, depth) * size
    shape = (count * -(-channels // rows), -(-depth // 128))
    scales = torch.exp2(2.0 * _random(*shape, seed=1)) / (64.0 * size)
    return StoredMatrix(values.clamp(-127, 127).to(stored), scales, dtype)


def _expanded(matrix: StoredMatrix, rows: int) -> Tensor:
    """In float64."""
    channels, depth = matrix.shape
    grid = matrix.scales.double().repeat_interleave(rows, 0)[:channels]
    return matrix.values.to(torch.float64) * grid.repeat_interleave(128, 1)[:, :depth]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [*SIZES, (300, 200)])
def test_expanded_weights_are_values_times_their_blocks_scales(
    size: tuple[int, int], rows: int, stored: torch.dtype
) -> None:
    matrix = _matrix(*size, stored, rows, torch.float32)
    weight = QuantisedWeight.kept(matrix)
    expected = _expanded(matrix, rows)
    torch.testing.assert_close(
        weight.dequantised(torch.float32).double(), expected, rtol=1e-7, atol=0.0
    )
    num_scales = matrix.scales.numel()
    assert weight.num_saved_bytes == 3 * size[0] * size[1] - 4 * num_scales
    if _device().type == "cpu":
        inputs = _random(3, size[1], seed=2)
        found = linear(inputs, weight, None).double()
        torch.testing.assert_close(found, inputs.double() @ expected.T, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES[1:] if IS_INTERPRETING else [*SIZES, *LARGE])
def test_products_are_those_of_the_expanded_weight(
    size: tuple[int, int],
    dtype: torch.dtype,
    rows: int,
    stored: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if IS_INTERPRETING:
        monkeypatch.setattr("shared.kernels.linear.is_hopper", lambda device: True)
    matrix = _matrix(*size, stored, rows, dtype)
    expanded = _expanded(matrix, rows)
    weight = QuantisedWeight.kept(matrix)
    assert weight.has_kernel
    inputs, bias = _random(300, size[1], seed=2).to(dtype), _random(size[0], seed=3).to(dtype)
    whole = linear(inputs, weight, bias)
    for num_rows in (1, 17, 300) if IS_INTERPRETING else (1, 2, 16, 17, 33, 64, 65, 129, 257, 300):
        own = inputs[:num_rows]
        found = linear(own, weight, bias)
        exact = multiplied(own, weight)
        assert product_error(found, exact, expanded, bias) < rounding_of(weight)
        if not IS_INTERPRETING:
            assert torch.equal(found, whole[:num_rows]), num_rows
            assert torch.equal(linear(inputs[-num_rows:], weight, bias), whole[-num_rows:])
    assert not weight.counters.any(), "counters are left as they were"


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("stored", "rows", "tile", "depth", "is_hopper"),
    crossed(STORED, ROWS, (16, 64), (384, 200), (True, False)),
)
def test_products_of_experts_equal_plain_torch(
    stored: torch.dtype,
    rows: int,
    tile: int,
    depth: int,
    is_hopper: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With rows in 8 bits and, where there is no Hopper or a part of a block, as they are."""
    if IS_INTERPRETING or not is_hopper:
        monkeypatch.setattr("shared.kernels.linear.is_hopper", lambda device: is_hopper)
    channels = 256 if rows > 1 else 40
    matrix = _matrix(channels, depth, stored, rows, torch.float16, NUM_EXPERTS)
    own = (each.chunk(NUM_EXPERTS) for each in (matrix.values.clone(), matrix.scales))
    each = (StoredMatrix(*pair, torch.float32) for pair in zip(*own, strict=True))
    oracle = ExpertWeight(tuple(map(QuantisedWeight.kept, each)), None, None, None)
    weight = ExpertWeight.kept(matrix, NUM_EXPERTS)
    assert weight.rounds_rows is (is_hopper and depth % 128 == 0)
    experts = _random(9, NUM_EXPERTS, seed=5).topk(NUM_CHOSEN, dim=-1).indices
    tiles = tiles_of(experts.flatten(), NUM_EXPERTS, tile)
    inputs = _random(9, depth, seed=2).half()
    exact = expert_product.plain(inputs.float(), experts, oracle, None)
    rounded = inputs.float()
    if weight.rounds_rows:
        rounded = rounded_rows(inputs, stored, is_by_block=rows > 0)
    expected = expert_product.plain(rounded, experts, oracle, None)
    found = expert_product(inputs, experts, weight, tiles)
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=0.05)
    # Bounds that would not tell whether rows are rounded would be useless.
    assert torch.allclose(found.float(), exact, rtol=2e-3, atol=0.05) is not weight.rounds_rows
    wide = expert_product(inputs.float(), experts, weight, tiles)
    torch.testing.assert_close(wide, exact, rtol=1e-4, atol=1e-2)
    gated = gated_product(inputs, experts, weight, tiles, Activation.SILU)
    torch.testing.assert_close(gated, gate_mul(found, Activation.SILU), rtol=2e-2, atol=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rows", ROWS)
def test_bits_of_pairs_depend_neither_on_tiles_nor_on_company(
    rows: int, stored: torch.dtype
) -> None:
    matrix = _matrix(1536, 2048, stored, rows, torch.bfloat16, NUM_EXPERTS)
    weight = ExpertWeight.kept(matrix, NUM_EXPERTS)
    assert weight.rounds_rows
    inputs = _random(300, 2048, seed=1).bfloat16()
    experts = _random(300, NUM_EXPERTS, seed=2).topk(NUM_CHOSEN, dim=-1).indices

    def product(count: int, num_rows: int) -> Tensor:
        some = experts[:count]
        return expert_product(
            inputs[:count], some, weight, tiles_of(some.flatten(), NUM_EXPERTS, num_rows)
        )

    whole = product(300, 16)
    for num_rows in (16, 32, 64, 128):
        for count in (1, 7, 64, 300):
            assert torch.equal(product(count, num_rows), whole[: count * NUM_CHOSEN]), num_rows
