"""The kernels for caps and sinks against the plain path, and the bits of a row."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shared.kernels.attention import PagedRows, paged_attention, plan_tiles
from shared.kernels.attention_rows import plan_rows
from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kv.batch import SequenceRows
from tests.helpers.attention_batches import Heads, chunk, packed, random_layer, tree, with_pages
from tests.helpers.kernel_device import kernel_device

attention_rows_triton = pytest.importorskip("shared.kernels.attention_rows_triton")

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
CPU, DEVICE = torch.device("cpu"), kernel_device()
PAGE_SIZE = 16
Maker = Callable[[random.Random], list[SequenceRows]]
BATCHES: dict[str, Maker] = {
    "plain tokens": lambda rng: [chunk(length, 1) for length in (0, 1, 17, 64, 90)],
    "tree": lambda rng: [tree(rng, start=70, num_nodes=6), chunk(5, 2)],
    "prompt": lambda rng: [chunk(0, 29)],
    "prompts beside others": lambda rng: [
        chunk(5, 2),
        chunk(40, 28),
        tree(rng, start=30, num_nodes=4),
        chunk(0, 30),
        chunk(9, 1),
    ],
    "few beside others": lambda rng: [
        chunk(40, 10),
        tree(rng, start=30, num_nodes=4),
        chunk(0, 9),
        chunk(9, 1),
    ],
    "level of a tree": lambda rng: [tree(rng, start=40, num_nodes=9, num_cached=5)],
}


@dataclass(frozen=True)
class Special:
    heads: Heads
    cap: float | None = None
    has_sinks: bool = False
    window: int | None = None


SPECIALS = {
    "cap": Special(Heads(4, 2, 16), cap=2.0),
    "cap and window": Special(Heads(4, 2, 16), cap=2.0, window=20),
    "sinks": Special(Heads(6, 2, 16), has_sinks=True),
    "sinks and window": Special(Heads(6, 2, 24), has_sinks=True, window=20),
}
# Every batch with a cap and with sinks, with a window and without: the interpreter takes its time.
INTERPRETED = [
    ("cap", "plain tokens", 32),
    ("cap", "level of a tree", 32),
    ("cap", "prompts beside others", 32),
    ("cap and window", "tree", 32),
    ("cap and window", "tree", 512),
    ("cap and window", "prompt", 32),
    ("sinks", "tree", 32),
    ("sinks", "tree", 512),
    ("sinks", "prompt", 32),
    ("sinks and window", "plain tokens", 32),
    ("sinks and window", "level of a tree", 32),
    ("sinks and window", "few beside others", 32),
]


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
        values,
        plan,
        scale=0.3,
        cap=special.cap,
        sinks=sinks,
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


@pytest.mark.parametrize(
    ("name", "batch", "span"),
    [
        (name, batch, span)
        for name in SPECIALS
        for batch in BATCHES
        for span in (32, 512)
        # One program takes all keys of a row: a tree's and a prompt's alike.
        if span == 32 or batch == "tree"
        if not IS_INTERPRETING or (name, batch, span) in INTERPRETED
    ],
)
def test_equals_the_plain_path(
    name: str, batch: str, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_rows_triton, "SPAN", span)
    monkeypatch.setattr(attention_rows_triton, "_TILE", 16)
    found, expected = _both(SPECIALS[name], BATCHES[batch](random.Random(3)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sinks and window"])
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
