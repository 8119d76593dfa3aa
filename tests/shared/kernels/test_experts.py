"""Products with experts and the choice of experts: kernels against plain torch, and rows that do
not depend on their company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.experts import (
    ExpertTiles,
    ExpertWeight,
    expert_product,
    gated_product,
    plain_tiles,
    tiles_of,
    weighted_parts,
    weighted_sum,
)
from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.linear import MAX_SEGMENT, LinearWeight
from shared.kernels.pointwise import Activation, Partials, gate_mul
from shared.kernels.quantised import QuantisedWeight
from shared.kernels.routing import RouterScores, Routing, route
from tests.helpers.kernel_device import kernel_device
from tests.helpers.products import ROUNDING, product_error, rounded_rows

NUM_EXPERTS, NUM_CHOSEN = 6, 2
ROUTINGS = {
    "softmax": Routing(NUM_EXPERTS, NUM_CHOSEN, RouterScores.SOFTMAX, normalises=False),
    "normalised": Routing(NUM_EXPERTS, NUM_CHOSEN, RouterScores.SOFTMAX, normalises=True),
    "sigmoid": Routing(NUM_EXPERTS, 3, RouterScores.SIGMOID, normalises=True, scale=2.5),
    "groups": Routing(NUM_EXPERTS, 2, RouterScores.SIGMOID, True, 1.5, 3, 2),
    "of the chosen": Routing(NUM_EXPERTS, 2, RouterScores.SOFTMAX_OF_CHOSEN, normalises=False),
}


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(kernel_device_or_cpu())


def kernel_device_or_cpu() -> torch.device:
    return kernel_device() if torch.cuda.is_available() else torch.device("cpu")


def _experts(num_rows: int, seed: int = 5) -> Tensor:
    scores = _random(num_rows, NUM_EXPERTS, seed=seed)
    return scores.topk(NUM_CHOSEN, dim=-1).indices


def _product(inputs: Tensor, experts: Tensor, weight: ExpertWeight, num_rows: int = 16) -> Tensor:
    tiles = None
    if weight.values is not None:
        tiles = tiles_of(experts.flatten(), NUM_EXPERTS, num_rows)
    return expert_product(inputs, experts, weight, tiles)


def test_every_pair_lies_in_a_tile_of_its_expert() -> None:
    experts = torch.tensor([3, 0, 3, 3, 5, 3, 3, 0], device=kernel_device_or_cpu())
    tiles = tiles_of(experts, NUM_EXPERTS, 4)
    found = []
    for tile, expert in enumerate(tiles.experts.tolist()):
        pairs = [pair for pair in tiles.pairs[tile * 4 : tile * 4 + 4].tolist() if pair < 8]
        assert all(int(experts[pair]) == expert for pair in pairs)
        found.extend(pairs)
    assert sorted(found) == list(range(8))


@pytest.mark.parametrize("num_rows", [1, 2, 5, 33])
def test_a_pairs_bits_do_not_depend_on_its_company(num_rows: int) -> None:
    weight = ExpertWeight.of(_random(NUM_EXPERTS, 48, 40), _random(NUM_EXPERTS, 48, seed=1))
    inputs, experts = _random(40, 40, seed=2), _experts(40)
    together = _product(inputs, experts, weight).view(40, NUM_CHOSEN, -1)
    for start in range(0, 40 - num_rows, num_rows):
        rows = slice(start, start + num_rows)
        alone = _product(inputs[rows], experts[rows], weight)
        assert torch.equal(alone.view(num_rows, NUM_CHOSEN, -1), together[rows])


@pytest.mark.interpreter
@pytest.mark.parametrize("num_rows", [1, 7, 40])
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_plain_torch(num_rows: int, tile: int, has_bias: bool) -> None:
    values = _random(NUM_EXPERTS, 70, 40)
    bias = _random(NUM_EXPERTS, 70, seed=1) if has_bias else None
    weight = ExpertWeight.of(values, bias)
    oracle = ExpertWeight(tuple(map(LinearWeight.prepare, values)), None, None, bias)
    experts = _experts(num_rows)
    for num_inputs in (num_rows, num_rows * NUM_CHOSEN):
        inputs = _random(num_inputs, 40, seed=2)
        expected = expert_product.plain(inputs, experts, oracle, None)
        actual = _product(inputs, experts, weight, tile)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.interpreter
def test_products_with_8_bit_weights_equal_plain_torch() -> None:
    values = _random(NUM_EXPERTS, 48, 40)
    oracle = ExpertWeight(
        tuple(QuantisedWeight.of(each, torch.int8) for each in values), None, None, None
    )
    weight = ExpertWeight.of(values, None, torch.int8)
    assert weight.num_saved_bytes == NUM_EXPERTS * (48 * 40 * 3 - 48 * 4)
    inputs, experts = _random(9, 40, seed=2), _experts(9)
    expected = expert_product.plain(inputs, experts, oracle, None)
    torch.testing.assert_close(_product(inputs, experts, weight), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("longest", [4096, 256])
def test_products_of_8_bit_weights_and_rows_equal_plain_torch(
    stored: torch.dtype, tile: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with sums that are cut into segments, of which the last one is shorter."""
    if IS_INTERPRETING:
        monkeypatch.setattr("shared.kernels.linear.is_hopper", lambda device: True)
    monkeypatch.setitem(MAX_SEGMENT, stored, longest)
    values, bias = _random(NUM_EXPERTS, 40, 640).half(), _random(NUM_EXPERTS, 40, seed=1).half()
    weight = ExpertWeight.of(values, bias, stored)
    assert weight.rounds_rows
    assert weight.values is not None
    assert weight.scales is not None
    held, experts = weight.values.double() * weight.scales, _experts(9)
    for num_inputs in (9, 9 * NUM_CHOSEN):
        inputs = _random(num_inputs, 640, seed=2).half()
        rounded = rounded_rows(inputs, stored, is_by_block=False)
        found = _product(inputs, experts, weight, tile)
        for pair, expert in enumerate(experts.flatten().tolist()):
            row = pair * num_inputs // experts.numel()
            own = slice(row, row + 1), held[expert], bias[expert]
            error = product_error(found[pair], rounded[own[0]], *own[1:])
            assert error < 2 * ROUNDING[torch.float16], (pair, error)
            # Rows that are not rounded would be found out.
            assert product_error(found[pair], inputs[own[0]], *own[1:]) > error


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("width", [24, 40])
def test_gated_products_equal_plain_torch(activation: Activation, width: int) -> None:
    weight = ExpertWeight.of(
        _random(NUM_EXPERTS, 2 * width, 40), _random(NUM_EXPERTS, 2 * width, seed=1)
    )
    inputs, experts = _random(9, 40, seed=2), _experts(9)
    tiles = tiles_of(experts.flatten(), NUM_EXPERTS, 16)
    expected = gate_mul(expert_product(inputs, experts, weight, tiles), activation)
    found = gated_product(inputs, experts, weight, tiles, activation)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("has_more", [False, True])
def test_weighted_sums_equal_plain_torch(has_more: bool) -> None:
    pairs, weights = _random(5 * NUM_CHOSEN, 70), _random(5, NUM_CHOSEN, seed=1)
    more = _random(5, 70, seed=2) if has_more else None
    expected = weighted_sum.plain(pairs, weights)
    found = weighted_sum(pairs, weights, more)
    expected = expected if more is None else expected + more
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.interpreter
def test_sums_that_are_left_in_parts_have_the_same_bits() -> None:
    weight = ExpertWeight.of(_random(NUM_EXPERTS, 48, 40))
    experts, weights = _experts(9), _random(9, NUM_CHOSEN, seed=1)
    inputs = _random(9 * NUM_CHOSEN, 40, seed=2)
    tiles = tiles_of(experts.flatten(), NUM_EXPERTS, 16)
    whole = weighted_sum(expert_product(inputs, experts, weight, tiles), weights)
    assert torch.equal(weighted_parts(inputs, weights, weight, tiles).total(), whole)


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("num_pairs", [1, 8, 100, 700])
@pytest.mark.parametrize("num_rows", [4, 16])
def test_tiles_equal_those_of_plain_torch(num_pairs: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_pairs)
    # Expert 6 is none.
    experts = torch.randint(1, 7, (num_pairs,), generator=generator).to(kernel_device_or_cpu())
    num_tiles = min(num_pairs, 7) + num_pairs // num_rows
    # Triton is not installed where there is no CUDA.
    from shared.kernels.experts_triton import laid_tiles

    found = laid_tiles(experts, 6, num_rows, num_tiles)
    expected = plain_tiles(experts, 6, num_rows, num_tiles)
    assert torch.equal(found.experts, expected.experts)
    num_used = int((expected.experts < 6).sum()) * num_rows
    assert found.pairs is not None
    assert expected.pairs is not None
    assert torch.equal(found.pairs[:num_used], expected.pairs[:num_used])


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("num_chosen", "num_pairs"), [(1, 1), (40, 16), (1, 17), (3, 17), (3, 64), (40, 64)]
)
def test_programs_find_the_pairs_that_tiles_would_hold(num_pairs: int, num_chosen: int) -> None:
    # Experts that many pairs share take several tiles; 40 is none.
    weight = ExpertWeight.of(_random(40, 48, 40))
    generator = torch.Generator().manual_seed(num_pairs)
    experts = torch.randint(40 - num_chosen, 41, (num_pairs,), generator=generator)
    experts = experts.to(kernel_device_or_cpu())
    inputs = _random(num_pairs, 40, seed=2)
    laid = plain_tiles(experts, 40, 16, num_pairs + 41)
    expected = expert_product(inputs, experts, weight, laid)
    found = expert_product(inputs, experts, weight, ExpertTiles(None, experts, 16))
    is_there = experts < 40
    assert torch.equal(found[is_there], expected[is_there])


@pytest.mark.interpreter
def test_pairs_of_no_expert_add_nothing() -> None:
    weight = ExpertWeight.of(_random(NUM_EXPERTS, 48, 40))
    inputs, experts = _random(9, 40, seed=2), _experts(9)
    weights = _random(9, NUM_CHOSEN, seed=1)
    is_own = experts < 3
    expected = _product(inputs, experts, weight).view(9, NUM_CHOSEN, -1)
    expected = (expected * (weights * is_own).unsqueeze(2)).sum(1)
    left = torch.where(is_own, experts, NUM_EXPERTS)
    found = weighted_sum(_product(inputs, left, weight), weights.masked_fill(~is_own, 0.0))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.interpreter
def test_logits_in_parts_are_added_before_the_choice() -> None:
    routing = ROUTINGS["normalised"]
    parts = torch.stack([_random(9, NUM_EXPERTS, seed=seed) for seed in range(3)])
    weights, experts = route(Partials(parts, torch.float32), None, routing)
    expected_weights, expected = route.plain(parts.sum(0), None, routing)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("is_corrected", [False, True])
def test_experts_are_chosen_as_by_plain_torch(name: str, is_corrected: bool) -> None:
    routing = ROUTINGS[name]
    logits = _random(33, NUM_EXPERTS)
    correction = _random(NUM_EXPERTS, seed=1) * 0.3 if is_corrected else None
    weights, experts = route(logits, correction, routing)
    expected_weights, expected = route.plain(logits, correction, routing)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.interpreter
def test_of_equal_scores_the_first_is_chosen() -> None:
    routing = Routing(NUM_EXPERTS, 2, RouterScores.SOFTMAX_OF_CHOSEN, normalises=False)
    logits = torch.tensor([[-1.0, -0.0, 0.0, -2.0, 0.0, -torch.inf]])
    _, experts = route(logits.to(kernel_device_or_cpu()), None, routing)
    assert experts.tolist() == [[1, 2]]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_of_no_numbers_name_experts(name: str) -> None:
    logits = torch.full((3, NUM_EXPERTS), torch.nan, device="cuda")
    _, experts = route(logits, None, ROUTINGS[name])
    assert bool(((experts >= 0) & (experts < NUM_EXPERTS)).all())


def test_a_correction_moves_the_choice_and_not_the_weights() -> None:
    routing = Routing(3, 1, RouterScores.SIGMOID, normalises=False)
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    weights, experts = route.plain(logits, torch.tensor([-1.0, 0.0, 0.0]), routing)
    assert experts.tolist() == [[1]]
    assert weights.item() == pytest.approx(1 / (1 + 2.718281828**-1.0))


def test_experts_of_lost_groups_are_not_chosen() -> None:
    routing = Routing(4, 2, RouterScores.SIGMOID, False, 1.0, 2, 1)
    logits = torch.tensor([[3.0, -9.0, 2.0, 1.0]])
    _, by_best = route.plain(logits, None, routing)
    _, by_two = route.plain(logits, torch.zeros(4), routing)
    assert sorted(by_best[0].tolist()) == [0, 1]
    assert sorted(by_two[0].tolist()) == [2, 3]
