"""The kernels for caps, sinks and latent rows against the plain path, and the bits of a row."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shared.kernels.attention import PagedRows, paged_attention, plan_tiles
from shared.kernels.attention_rows import plan_rows
from shared.kv.batch import SequenceRows
from tests.helpers.attention_batches import Heads, chunk, packed, random_layer, tree, with_pages
from tests.helpers.kernel_device import kernel_device

attention_rows_triton = pytest.importorskip("shared.kernels.attention_rows_triton")
attention_prompts_triton = pytest.importorskip("shared.kernels.attention_prompts_triton")
expanded_attention = attention_prompts_triton.expanded_attention

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
CPU, DEVICE = torch.device("cpu"), kernel_device()
PAGE_SIZE = 16
Maker = Callable[[random.Random], list[SequenceRows]]
BATCHES: dict[str, Maker] = {
    "plain tokens": lambda rng: [chunk(length, 1) for length in (0, 1, 17, 64, 90)],
    "tree": lambda rng: [tree(rng, start=70, num_nodes=6), chunk(5, 2)],
    "prompt": lambda rng: [chunk(0, 21)],
    "prompts beside others": lambda rng: [
        chunk(5, 2),
        chunk(40, 20),
        tree(rng, start=30, num_nodes=4),
        chunk(0, 30),
        chunk(9, 1),
    ],
    "level of a tree": lambda rng: [tree(rng, start=40, num_nodes=9, num_cached=5)],
}


@dataclass(frozen=True)
class Special:
    heads: Heads
    cap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None
    window: int | None = None


SPECIALS = {
    "cap": Special(Heads(4, 2, 16), cap=2.0),
    "cap and window": Special(Heads(4, 2, 16), cap=2.0, window=20),
    "sinks": Special(Heads(6, 2, 16), has_sinks=True),
    "sinks and window": Special(Heads(6, 2, 24), has_sinks=True, window=20),
    "latent": Special(Heads(5, 1, 40), value_dim=32),
    "latent of an odd width": Special(Heads(20, 1, 28), value_dim=20),
}


def _attend(special: Special, rows: PagedRows, tensors: list[Tensor], *, is_plain: bool) -> Tensor:
    plan = (
        plan_tiles(rows, sliding_window=special.window, num_query_groups=special.heads.num_groups)
        if is_plain
        else plan_rows(rows, special.window, special.heads.num_groups)
    )
    queries, keys, values = tensors
    sinks = None
    if special.has_sinks:
        sinks = torch.linspace(-1.0, 2.0, special.heads.num_heads).to(queries)
    return paged_attention(
        queries,
        keys,
        keys if special.value_dim is not None else values,
        plan,
        scale=0.3,
        cap=special.cap,
        sinks=sinks,
        value_dim=special.value_dim,
    )


def _both(special: Special, sequences: list[SequenceRows]) -> tuple[Tensor, Tensor]:
    placed, num_slots = with_pages(random.Random(7), sequences, PAGE_SIZE)
    rows = packed(placed, PAGE_SIZE, CPU)
    layer = random_layer(len(rows.positions), num_slots, special.heads, torch.float32)
    plain = [layer.queries, layer.keys, layer.values]
    expected = _attend(special, rows, plain, is_plain=True)
    # Page 0 is never a live page.
    poisoned = [each.clone().to(DEVICE) for each in plain]
    for each in poisoned[1:]:
        each[:PAGE_SIZE] = torch.nan
    found = _attend(special, packed(placed, PAGE_SIZE, DEVICE), poisoned, is_plain=False)
    return found.cpu(), expected


def _runs(name: str, batch: str) -> bool:
    """Whether that is one call: latent prompts are expanded by their layer."""
    return SPECIALS[name].value_dim is None or "prompt" not in batch


@pytest.mark.parametrize(
    ("name", "batch", "span"),
    [
        (name, batch, span)
        for name in SPECIALS
        for batch in BATCHES
        for span in (32, 512)
        # One program takes all keys of a row: a tree's and a prompt's alike.
        if _runs(name, batch) and (span == 32 or batch == "tree")
    ],
)
def test_equals_the_plain_path(
    name: str, batch: str, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_rows_triton, "SPAN", span)
    monkeypatch.setattr(attention_rows_triton, "_TILE", 16)
    found, expected = _both(SPECIALS[name], BATCHES[batch](random.Random(3)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sinks and window", "latent"])
def test_bits_do_not_depend_on_how_many_programs_share_the_keys(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_rows_triton, "SPAN", 32)
    monkeypatch.setattr(attention_rows_triton, "_TILE", 16)
    sequences = BATCHES["tree"](random.Random(3))
    shared, _ = _both(SPECIALS[name], sequences)
    monkeypatch.setattr(attention_rows_triton, "_MANY_ROWS", 1)
    whole, _ = _both(SPECIALS[name], sequences)
    assert torch.equal(shared, whole)


@pytest.mark.parametrize("most_bytes", [2**28, 1])
@pytest.mark.parametrize("dims", [(16, 8, 16, 32), (24, 8, 12, 20)])
def test_expanded_prompts_equal_absorbed_ones(
    most_bytes: int, dims: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_prompts_triton, "_MOST_EXPANDED_BYTES", most_bytes)
    straight, rotary, value, latent = dims
    sequences = [chunk(5, 2), chunk(40, 20), chunk(0, 30)]
    placed, num_slots = with_pages(random.Random(7), sequences, PAGE_SIZE)
    rows = packed(placed, PAGE_SIZE, DEVICE)
    plan = plan_rows(rows, None, 3)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    cache, queries = draw(num_slots, 1, latent + rotary), draw(52, 3, straight + rotary)
    key_up, value_up = draw(3, straight, latent), draw(3, value, latent)
    results = plan.results(queries, value)
    expanded_attention(queries, cache, key_up, value_up, results, plan, scale=0.2)
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
    assert plan.rows[plan.rows < 52].tolist() == [0, 1]
