"""The kernels of latent attention against the plain path, and the bits of a row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shared.kernels.attention import paged_attention, plan_tiles
from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.latent import (
    absorbed_queries,
    enter,
    expanded_values,
    plan_latents,
)
from shared.kernels.pointwise import Partials, rotation_tables
from shared.kv.batch import SequenceRows
from tests.helpers.attention_batches import Heads, chunk, packed, random_layer, tree, with_pages
from tests.helpers.kernel_device import kernel_device

latent_triton = pytest.importorskip("shared.kernels.latent_triton")
attention_prompts_triton = pytest.importorskip("shared.kernels.attention_prompts_triton")
expanded_attention = attention_prompts_triton.expanded_attention

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
CPU, DEVICE = torch.device("cpu"), kernel_device()
PAGE_SIZE = 16
Maker = Callable[[random.Random], list[SequenceRows]]
BATCHES: dict[str, Maker] = {
    "plain tokens": lambda _: [chunk(length, 1) for length in (0, 1, 17, 64, 90)],
    "tree": lambda rng: [tree(rng, start=70, num_nodes=6), chunk(5, 2)],
    "chain": lambda _: [chunk(61, 9)],
    "one token": lambda _: [chunk(64, 1)],
    "level of a tree": lambda rng: [tree(rng, start=40, num_nodes=9, num_cached=5)],
}


@dataclass(frozen=True)
class Size:
    num_heads: int
    latent: int
    rotary: int


# Rows that share a program, an odd width, and heads for more than one program.
SIZES = {"few heads": Size(5, 32, 8), "odd": Size(20, 20, 8), "many heads": Size(70, 16, 8)}
# Each size and each batch once: the interpreter takes its time.
INTERPRETED = [
    ("few heads", "tree"),
    ("few heads", "chain"),
    ("odd", "level of a tree"),
    ("odd", "plain tokens"),
    ("many heads", "one token"),
]


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_triton, "FIRST_SPLIT_KEYS", 32)
    monkeypatch.setattr(latent_triton, "SPLITS_PER_LEVEL", 2)
    monkeypatch.setattr(latent_triton, "TILE_KEYS", 16)


def _both(size: Size, sequences: list[SequenceRows]) -> tuple[Tensor, Tensor]:
    """Returns what the kernels make of a batch, and the plain path."""
    placed, num_slots = with_pages(random.Random(7), sequences, PAGE_SIZE)
    rows = packed(placed, PAGE_SIZE, CPU)
    heads = Heads(size.num_heads, 1, size.latent + size.rotary)
    layer = random_layer(len(rows.positions), num_slots, heads, torch.float32)
    plain = plan_tiles(rows, sliding_window=None, num_query_groups=size.num_heads)
    expected = paged_attention(
        layer.queries, layer.keys, layer.keys, plain, scale=0.3, value_dim=size.latent
    )
    # Page 0 is never a live page.
    poisoned = layer.keys.clone()
    poisoned[:PAGE_SIZE] = torch.nan
    plan = plan_latents(packed(placed, PAGE_SIZE, DEVICE), size.num_heads)
    cache = poisoned.to(DEVICE)
    queries = layer.queries.to(DEVICE)
    found = paged_attention(queries, cache, cache, plan, scale=0.3, value_dim=size.latent)
    return found.cpu(), expected


@pytest.mark.parametrize(
    ("size", "name"),
    [
        case
        for case in itertools.product(SIZES, BATCHES)
        if not IS_INTERPRETING or case in INTERPRETED
    ],
)
def test_equals_the_plain_path_however_many_programs_share_the_splits(
    size: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for most in (1, 2**30):
        monkeypatch.setattr(latent_triton, "TARGET_PROGRAMS", most)
        found, expected = _both(SIZES[size], BATCHES[name](random.Random(3)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        results.append(found)
    assert torch.equal(*results)


def test_a_token_has_the_bits_of_a_node() -> None:
    """A chain as a tree's only path, as causal rows, and one row after the other."""
    size, num_rows, start = SIZES["few heads"], 5, 70
    num_slots = 6 * PAGE_SIZE
    heads = Heads(size.num_heads, 1, size.latent + size.rotary)
    layer = random_layer(num_rows, num_slots, heads, torch.float32).to(DEVICE)
    pages = tuple(range(1, 6))

    def attended(rows: SequenceRows, queries: Tensor) -> Tensor:
        batch = packed([rows], PAGE_SIZE, DEVICE)
        plan = plan_latents(batch, size.num_heads)
        return paged_attention(
            queries, layer.keys, layer.keys, plan, scale=0.3, value_dim=size.latent
        )

    def placed(rows: SequenceRows) -> SequenceRows:
        return SequenceRows(
            token_ids=rows.token_ids,
            positions=rows.positions,
            kv_start=rows.kv_start,
            pages=pages,
            prefix_length=rows.prefix_length,
            tail_mask=rows.tail_mask,
            logit_rows=(),
        )

    chain = placed(chunk(start, num_rows))
    path = SequenceRows(
        token_ids=chain.token_ids,
        positions=chain.positions,
        kv_start=start,
        pages=pages,
        prefix_length=start,
        tail_mask=[[column <= row for column in range(num_rows)] for row in range(num_rows)],
        logit_rows=(),
    )

    # On the host products of other sizes may have other bits, as its library pleases.
    def is_same(found: Tensor, wanted: Tensor) -> bool:
        if DEVICE.type == "cuda":
            return torch.equal(found, wanted)
        return torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)

    expected = attended(path, layer.queries)
    assert is_same(attended(chain, layer.queries), expected)
    for row in range(num_rows):
        alone = attended(placed(chunk(start + row, 1)), layer.queries[row : row + 1])
        assert is_same(alone[0], expected[row])


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _tables(num_rows: int, rotary: int) -> tuple[Tensor, Tensor]:
    return rotation_tables(_draw(num_rows, rotary // 2, seed=9), 1.0)


@pytest.mark.parametrize("num_parts", [0, 1, 3])
@pytest.mark.parametrize("dims", [(24, 16, 8), (20, 12, 4)])
def test_what_enters_the_cache(num_parts: int, dims: tuple[int, int, int]) -> None:
    """Whole or in parts, and without queries to norm."""
    num_queries, latent, rotary = dims
    parts = _draw(max(num_parts, 1), 5, sum(dims))
    query_norm = None if num_parts == 0 else (_draw(num_queries, seed=1), 1e-6)
    latent_norm = _draw(latent, seed=2), 1e-5
    tables, slots = _tables(5, rotary), torch.tensor([3, 9, 4, 1, 7])
    expected_cache = torch.zeros(12, 1, latent + rotary)
    expected = enter.plain(parts.sum(0), query_norm, latent_norm, tables, expected_cache, slots)
    cache = torch.zeros_like(expected_cache).to(DEVICE)
    whole = parts[0].to(DEVICE)
    found = latent_triton.fused_enter(
        Partials(parts.to(DEVICE), torch.float32) if num_parts > 1 else whole,
        None if query_norm is None else (query_norm[0].to(DEVICE), query_norm[1]),
        (latent_norm[0].to(DEVICE), latent_norm[1]),
        (tables[0].to(DEVICE), tables[1].to(DEVICE)),
        cache,
        slots.to(DEVICE),
    )
    torch.testing.assert_close(cache.cpu(), expected_cache, rtol=1e-4, atol=1e-5)
    assert (found is None) == (expected is None)
    if found is not None:
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 5, 20])
@pytest.mark.parametrize("dims", [(16, 8, 32), (24, 4, 20)])
def test_products_by_head(num_rows: int, dims: tuple[int, int, int]) -> None:
    straight, rotary, latent = dims
    # As the slice of a wider product.
    wide = _draw(num_rows, 3 * (straight + rotary) + 8)
    queries = wide[:, :-8].view(num_rows, 3, straight + rotary)
    key_up, value_up = _draw(3, straight, latent, seed=1), _draw(3, straight, latent, seed=2)
    tables = _tables(num_rows, rotary)
    on_device = wide.to(DEVICE)[:, :-8].view(num_rows, 3, straight + rotary)
    found = latent_triton.fused_head_products(
        on_device,
        key_up.to(DEVICE),
        (tables[0].to(DEVICE), tables[1].to(DEVICE)),
        is_transposed=True,
    )
    expected = absorbed_queries.plain(queries, key_up, tables)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    latents = _draw(num_rows, 3, latent, seed=3)
    found = latent_triton.fused_head_products(
        latents.to(DEVICE), value_up.to(DEVICE), None, is_transposed=False
    )
    expected = expanded_values.plain(latents, value_up)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most_bytes", [2**28, 1])
@pytest.mark.parametrize("dims", [(16, 8, 16, 32), (24, 8, 12, 20)])
def test_expanded_prompts_equal_absorbed_ones(
    most_bytes: int, dims: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_prompts_triton, "_MAX_EXPANDED_BYTES", most_bytes)
    straight, rotary, value, latent = dims
    sequences = [chunk(5, 2), chunk(40, 28), chunk(0, 30)]
    placed, num_slots = with_pages(random.Random(7), sequences, PAGE_SIZE)
    rows = packed(placed, PAGE_SIZE, DEVICE)
    plan = plan_latents(rows, 3)
    assert plan.prompts is not None
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    cache, queries = draw(num_slots, 1, latent + rotary), draw(60, 3, straight + rotary)
    key_up, value_up = draw(3, straight, latent), draw(3, value, latent)
    results = plan.results(queries, value)
    expanded_attention(queries, cache, key_up, value_up, results, plan.prompts, scale=0.2)
    absorbed = torch.einsum("thn,hnl->thl", queries[..., :straight], key_up)
    attended = paged_attention(
        torch.cat((absorbed, queries[..., straight:]), -1).cpu(), cache.cpu(), cache.cpu(),
        plan_tiles(packed(placed, PAGE_SIZE, CPU), sliding_window=None, num_query_groups=3),
        scale=0.2, value_dim=latent,
    )  # fmt: skip
    expected = torch.einsum("thl,hvl->thv", attended, value_up.cpu())
    # The first two rows are no prompt's.
    torch.testing.assert_close(results[2:-1].cpu(), expected[2:], rtol=1e-3, atol=1e-3)
    assert plan.rows is not None
    assert plan.rows[plan.rows < 60].tolist() == [0, 1]
