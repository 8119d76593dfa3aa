"""Latent attention in half precision at the heads of DeepSeek-V3 and of V2-Lite: the error against
plain torch in float32, and the bits of a row in company."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from shared.kernels.attention import paged_attention, plan_tiles
from shared.kernels.latent import absorbed_queries, expanded_values, plan_latents
from shared.kv.batch import SequenceRows
from tests.helpers.attention_batches import chunk, packed, tree, with_pages

pytestmark = pytest.mark.gpu
PAGE_SIZE, LATENT, ROTARY = 16, 512, 64
BATCHES: dict[str, list[SequenceRows]] = {
    "plain tokens": [chunk(length, 1) for length in (0, 1, 300, 2000)],
    "tree": [tree(random.Random(3), start=700, num_nodes=32), chunk(5, 2)],
}


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)


def _attended(
    queries: Tensor, cache: Tensor, sequences: list[SequenceRows], dtype: torch.dtype
) -> Tensor:
    rows = packed(sequences, PAGE_SIZE, torch.device("cuda"))
    num_heads = queries.shape[1]
    plan = (
        plan_latents(rows, num_heads)
        if dtype is torch.bfloat16
        else plan_tiles(rows, sliding_window=None, num_query_groups=num_heads)
    )
    keys = cache.to(dtype)
    return paged_attention(queries.to(dtype), keys, keys, plan, scale=0.05, value_dim=LATENT)


@pytest.mark.parametrize("num_heads", [128, 16])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention(num_heads: int, batch: str) -> None:
    placed, num_slots = with_pages(random.Random(7), BATCHES[batch], PAGE_SIZE)
    num_rows = sum(len(rows.token_ids) for rows in placed)
    queries = _random(num_rows, num_heads, LATENT + ROTARY, seed=0)
    cache = _random(num_slots, 1, LATENT + ROTARY, seed=1)
    found = _attended(queries, cache, placed, torch.bfloat16)
    wanted = _attended(queries, cache, placed, torch.float32).double()
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error < 1e-2, f"relative error {error:.2e}"


@pytest.mark.parametrize("num_heads", [128, 16])
def test_a_row_has_the_bits_that_it_has_alone(num_heads: int) -> None:
    placed, num_slots = with_pages(
        random.Random(7), [chunk(500 + 90 * index, 1) for index in range(56)], PAGE_SIZE
    )
    queries = _random(len(placed), num_heads, LATENT + ROTARY, seed=0)
    cache = _random(num_slots, 1, LATENT + ROTARY, seed=1)
    together = _attended(queries, cache, placed, torch.bfloat16)
    for row in (0, 9, 55):
        alone = _attended(queries[row : row + 1], cache, placed[row : row + 1], torch.bfloat16)
        assert torch.equal(alone[0], together[row])


def test_products_by_head_keep_the_bits_of_a_row() -> None:
    key_up, value_up = (_random(128, 128, LATENT, seed=seed) * 0.05 for seed in (0, 1))
    queries, attended = _random(200, 128, 192, seed=2), _random(200, 128, LATENT, seed=3)
    tables = torch.rand(200, 1, ROTARY, device="cuda"), torch.rand(200, 1, ROTARY, device="cuda")
    entered = absorbed_queries(queries, key_up, tables)
    expanded = expanded_values(attended, value_up)
    for count in (1, 17, 40):
        own = tables[0][:count], tables[1][:count]
        assert torch.equal(absorbed_queries(queries[:count], key_up, own), entered[:count])
        assert torch.equal(expanded_values(attended[:count], value_up), expanded[:count])
