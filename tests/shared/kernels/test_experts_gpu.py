"""Kernels of mixtures of experts and of latent attention in half precision, at the sizes of
published models, against plain torch in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shared.kernels.attention import paged_attention, plan_tiles
from shared.kernels.attention_rows import plan_rows
from shared.kernels.experts import (
    ExpertWeight,
    expert_product,
    gated_product,
    tile_rows,
    tiles_of,
    weighted_parts,
    weighted_sum,
)
from shared.kernels.latent import plan_latents
from shared.kernels.linear import LinearWeight, wide_linear
from shared.kernels.pointwise import Activation, gate_mul, total_of
from shared.kernels.routing import RouterScores, Routing, route
from shared.kv.batch import SequenceRows
from tests.helpers.attention_batches import Heads, chunk, packed, random_layer, tree, with_pages
from tests.helpers.products import rounded_rows

pytestmark = pytest.mark.gpu
PAGE_SIZE = 16
ROUTINGS = {
    "Qwen3": (Routing(128, 8, RouterScores.SOFTMAX, normalises=True), False),
    "DeepSeek-V3": (Routing(256, 8, RouterScores.SIGMOID, True, 2.5, 8, 4), True),
    "gpt-oss": (Routing(32, 4, RouterScores.SOFTMAX_OF_CHOSEN, normalises=False), False),
}
BATCHES: dict[str, list[SequenceRows]] = {
    "plain tokens": [chunk(length, 1) for length in (0, 1, 300, 2000)],
    "tree": [tree(random.Random(3), start=700, num_nodes=32), chunk(5, 2)],
    "prompts": [chunk(0, 300), chunk(900, 100)],
}


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def _assert_near(found: Tensor, expected: Tensor, most: float) -> None:
    wanted = expected.double()
    error = (found.double() - wanted).norm() / wanted.norm()
    assert float(error) < most, f"relative error {float(error):.2e}"


def _held(weight: ExpertWeight) -> Tensor:
    """Returns the weights as they multiply, `[E, N, K]`."""
    values = weight.values
    assert values is not None
    return values.float() if weight.scales is None else values.float() * weight.scales


@pytest.mark.parametrize("num_rows", [1, 8, 64, 1024])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_experts", [8, 128])
def test_products_of_experts(num_rows: int, stored: torch.dtype | None, num_experts: int) -> None:
    values = _random(num_experts, 768, 2048, seed=0) * 0.02
    weight = ExpertWeight.of(values, None, stored)
    held = _held(weight)
    inputs = _random(num_rows, 2048, seed=1)
    multiplied = inputs
    if stored is not None:
        assert weight.rounds_rows
        multiplied = rounded_rows(inputs, stored, is_by_block=False)
    experts = _random(num_rows, num_experts, seed=2).float().topk(2, dim=-1).indices
    tiles = tiles_of(experts.flatten(), num_experts, tile_rows(experts.numel(), weight))
    found = expert_product(inputs, experts, weight, tiles).view(num_rows, 2, -1)
    for choice in range(2):
        own = held.index_select(0, experts[:64, choice])
        expected = torch.bmm(own.double(), multiplied[:64].double().unsqueeze(2)).squeeze(2)
        _assert_near(found[:64, choice], expected, 5e-3)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
def test_bits_do_not_depend_on_the_size_of_tiles(stored: torch.dtype | None) -> None:
    weight = ExpertWeight.of(_random(8, 1536, 2048, seed=0) * 0.02, None, stored)
    inputs = _random(300, 2048, seed=1)
    experts = _random(300, 8, seed=2).float().topk(2, dim=-1).indices
    found = [
        expert_product(inputs, experts, weight, tiles_of(experts.flatten(), 8, num_rows))
        for num_rows in (16, 32, 64, 128)
    ]
    assert all(torch.equal(each, found[0]) for each in found[1:])


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN until a kernel writes them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_experts", [16, 128])
def test_rows_have_the_bits_that_they_have_alone(
    stored: torch.dtype | None, num_experts: int
) -> None:
    gate_up = ExpertWeight.of(_random(num_experts, 512, 1024, seed=0) * 0.05, None, stored)
    down = ExpertWeight.of(_random(num_experts, 1024, 256, seed=1) * 0.05, None, stored)
    routing = Routing(num_experts, 8, RouterScores.SOFTMAX, normalises=True)
    hidden = _random(64, 1024, seed=2)
    logits = _random(64, num_experts, seed=3, dtype=torch.float32)

    def computed(rows: slice) -> Tensor:
        weights, experts = route(logits[rows], None, routing)
        tiles = tiles_of(experts.flatten(), num_experts, tile_rows(experts.numel(), gate_up))
        gated = gated_product(hidden[rows], experts, gate_up, tiles, Activation.SILU)
        return weighted_parts(gated, weights, down, tiles).total()

    whole = computed(slice(0, 64))
    assert bool(whole.isfinite().all())
    for row in range(64):
        assert torch.equal(computed(slice(row, row + 1)), whole[row : row + 1]), row
        assert torch.equal(computed(slice(0, row + 1)), whole[: row + 1]), row


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("num_rows", [1, 64, 2000])
def test_gated_products(activation: Activation, num_rows: int) -> None:
    weight = ExpertWeight.of(_random(8, 1536, 2048, seed=0) * 0.02)
    inputs = _random(num_rows, 2048, seed=1)
    experts = _random(num_rows, 8, seed=2).float().topk(2, dim=-1).indices
    tiles = tiles_of(experts.flatten(), 8, tile_rows(experts.numel(), weight))
    found = gated_product(inputs, experts, weight, tiles, activation)
    expected = gate_mul(expert_product(inputs, experts, weight, tiles).float(), activation)
    _assert_near(found, expected, 1e-2)


@pytest.mark.parametrize(("num_experts", "depth"), [(128, 4096), (16, 512)])
def test_logits_of_a_wide_router(num_experts: int, depth: int) -> None:
    inputs, values = _random(6000, depth, seed=0), _random(num_experts, depth, seed=1) * 0.02
    weight = LinearWeight.prepare(values)
    found = total_of(wide_linear(inputs, weight))
    assert found.dtype is torch.float32
    _assert_near(found, inputs.double() @ values.double().T, 1e-5)
    for num_rows in (1, 9, 64, 65, 200, 300):
        some = total_of(wide_linear(inputs[:num_rows], weight))
        assert torch.equal(some, found[:num_rows]), num_rows


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_rows", [1, 64, 3000])
def test_experts_are_chosen_as_by_plain_torch(name: str, num_rows: int) -> None:
    routing, is_corrected = ROUTINGS[name]
    logits = _random(num_rows, routing.num_experts, seed=0, dtype=torch.float32)
    correction = None
    if is_corrected:
        correction = _random(routing.num_experts, seed=1, dtype=torch.float32) * 0.1
    weights, experts = route(logits, correction, routing)
    expected_weights, expected = route.plain(logits, correction, routing)
    # Two scores may be equal in one of the ways of computing them.
    assert float((experts == expected).float().mean()) > 0.999
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)


def test_weighted_sums() -> None:
    pairs, weights = _random(500 * 8, 2048, seed=0), _random(500, 8, seed=1, dtype=torch.float32)
    _assert_near(weighted_sum(pairs, weights), weighted_sum.plain(pairs.float(), weights), 5e-3)


@pytest.mark.parametrize("kind", ["sinks", "cap"])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_of_rows(kind: str, batch: str) -> None:
    heads = Heads(64, 8, 64)
    placed, num_slots = with_pages(random.Random(7), BATCHES[batch], PAGE_SIZE)
    rows = packed(placed, PAGE_SIZE, torch.device("cuda"))
    layer = random_layer(len(rows.positions), num_slots, heads, torch.bfloat16).to(
        torch.device("cuda")
    )
    sinks = _random(64, seed=5) if kind == "sinks" else None
    window = 128 if kind == "sinks" else None
    plain = plan_tiles(rows, sliding_window=window, num_query_groups=heads.num_groups)

    def attended(plan: object, dtype: torch.dtype) -> Tensor:
        keys = layer.keys.to(dtype)
        return paged_attention(
            layer.queries.to(dtype),
            keys,
            layer.values.to(dtype),
            plan,  # type: ignore[arg-type]
            scale=heads.head_dim**-0.5,
            cap=20.0 if kind == "cap" else None,
            sinks=sinks,
        )

    found = attended(plan_rows(rows, window, heads.num_groups), torch.bfloat16)
    _assert_near(found, attended(plain, torch.float32), 1e-2)


def test_expanded_prompts_at_the_size_of_deepseek_v3() -> None:
    # Triton is not installed where there is no CUDA.
    from shared.kernels.attention_prompts_triton import expanded_attention

    sequences = [chunk(900, 100), chunk(0, 300), chunk(5, 1)]
    placed, num_slots = with_pages(random.Random(7), sequences, PAGE_SIZE)
    rows = packed(placed, PAGE_SIZE, torch.device("cuda"))
    cache = _random(num_slots, 1, 576, seed=0) * 0.3
    queries = _random(401, 128, 192, seed=1)
    key_up, value_up = (_random(128, 128, 512, seed=seed) * 0.05 for seed in (2, 3))
    plan = plan_latents(rows, 128)
    assert plan.prompts is not None
    results = plan.results(queries, 128)
    expanded_attention(queries, cache, key_up, value_up, results, plan.prompts, scale=0.1)
    latents, turned = cache[:, 0, :512].float(), cache[:, 0, 512:].float()
    wide = queries.float()
    # Some rows of both prompts, against all keys that they see.
    for row, start, count in ((0, 0, 901), (99, 0, 1000), (100, 1000, 1), (399, 1000, 300)):
        slots = plan.prompts.key_slots[start : start + count]
        keys = torch.einsum("sl,hnl->hsn", latents[slots], key_up.float())
        values = torch.einsum("sl,hvl->hsv", latents[slots], value_up.float())
        scores = torch.einsum("hn,hsn->hs", wide[row, :, :128], keys)
        scores += wide[row, :, 128:] @ turned[slots].T
        expected = torch.einsum("hs,hsv->hv", (scores * 0.1).softmax(-1), values)
        _assert_near(results[row], expected, 2e-2)
