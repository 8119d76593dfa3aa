"""The CUDA kernels against the plain path, and the bits of a row against its company.

Page 0 is poisoned in every test: no kernel may read it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.kernels.attention import PagedRows, paged_attention, plan_attention, plan_tiles
from shared.kernels.cache import CacheScales, store
from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.split_plan import FIRST_SPLIT_KEYS, SPLITS_PER_LEVEL
from shared.kv.batch import SequenceRows
from tests.helpers.attention_batches import (
    Heads,
    Layer,
    chunk,
    packed,
    random_layer,
    tree,
    with_pages,
)
from tests.helpers.kernel_device import kernel_device, some_interpreted

attention_triton = pytest.importorskip("shared.kernels.attention_triton")

pytestmark = pytest.mark.gpu
CPU, CUDA = torch.device("cpu"), kernel_device()
LLAMA = Heads(32, 8, 128)
# Few enough programs for Triton's interpreter, which runs one after the other.
SMALL_BATCHES = ("one token", "plain tokens", "page edges", "tree levels")
NEVER = 2**30
# Longest list that one program takes, and how many of a longer one's length make it take that, too.
SHARING = {
    "all share": (0, NEVER),
    "long ones share": (96, NEVER),
    "long ones share if they are few": (96, 8),
    "none share": (0, 0),
}
# Behind them splits are twice as long.
LEVEL_KEYS = FIRST_SPLIT_KEYS * SPLITS_PER_LEVEL
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Maker = Callable[[random.Random], list[SequenceRows]]
BATCHES: dict[str, Maker] = {
    "one token": lambda rng: [chunk(0, 1)],
    "plain tokens": lambda rng: [chunk(length, 1) for length in (0, 1, 15, 16, 17, 127, 128, 700)],
    "page edges": lambda rng: [chunk(start, 3) for start in (13, 14, 15, 16, 61, 62, 63, 64)],
    "split edges": lambda rng: [
        chunk(LEVEL_KEYS + offset, 1)
        for offset in (-2, -1, 0, 2 * FIRST_SPLIT_KEYS - 1, 2 * FIRST_SPLIT_KEYS)
    ],
    "trees": lambda rng: [
        tree(rng, start=start, num_nodes=nodes)
        for start, nodes in ((5, 1), (64, 64), (120, 17), (127, 2), (300, 33), (1000, 8))
    ],
    "tree levels": lambda rng: [tree(rng, start=90, num_nodes=20, num_cached=12)],
    "largest tree": lambda rng: [tree(rng, start=513, num_nodes=257)],
    "chunks": lambda rng: [
        chunk(0, 17),
        chunk(0, 25),
        chunk(40, 100),
        chunk(0, 300),
        chunk(511, 129),
    ],
    "everything": lambda rng: [
        tree(rng, start=70, num_nodes=30),
        chunk(33, 1),
        chunk(0, 200),
        tree(rng, start=0, num_nodes=7),
        chunk(250, 16),
    ],
}


def attend(rows: PagedRows, layer: Layer, *, heads: Heads, window: int | None = None) -> Tensor:
    """Returns the kernels' result; `rows` and `layer` are on the device."""
    plan = plan_attention(rows, sliding_window=window, num_query_groups=heads.num_groups)
    scale = 1 / math.sqrt(heads.head_dim)
    return paged_attention(layer.queries, layer.keys, layer.values, plan, scale=scale)


def exact(
    rows: PagedRows, layer: Layer, *, heads: Heads, window: int | None, device: torch.device
) -> Tensor:
    """Returns the plain path's result in float32, where page 0 is not poisoned."""
    plan = plan_tiles(rows, sliding_window=window, num_query_groups=heads.num_groups)
    wide = [tensor.to(device).float() for tensor in (layer.queries, layer.keys, layer.values)]
    return paged_attention(*wide, plan, scale=1 / math.sqrt(heads.head_dim)).cpu()


def poison(layer: Layer, page_size: int) -> Layer:
    layer.keys[:page_size] = torch.nan
    layer.values[:page_size] = torch.nan
    return layer


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double().cpu() - expected.double()).norm()
    return float(difference / expected.double().norm())


def check(
    sequences: list[SequenceRows],
    heads: Heads,
    dtype: torch.dtype,
    *,
    page_size: int,
    window: int | None = None,
    oracle_device: torch.device = CPU,
) -> None:
    placed, num_slots = with_pages(random.Random(7), sequences, page_size)
    rows = packed(placed, page_size, oracle_device)
    layer = random_layer(len(rows.positions), num_slots, heads, dtype)
    expected = exact(rows, layer, heads=heads, window=window, device=oracle_device)
    on_device = poison(layer.to(CUDA), page_size)
    found = attend(packed(placed, page_size, CUDA), on_device, heads=heads, window=window)
    assert found.dtype == dtype
    assert relative_error(found, expected) < LARGEST_ERROR[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    "name",
    some_interpreted(BATCHES, SMALL_BATCHES),
)
def test_equals_the_plain_path(name: str, window: int | None, dtype: torch.dtype) -> None:
    heads = Heads(8, 2, 64)
    check(BATCHES[name](random.Random(3)), heads, dtype, page_size=16, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "window"),
    some_interpreted(
        [case for case in itertools.product(BATCHES, [None, 300]) if case[0] != "chunks"],
        [("tree levels", 300)],
    ),
)
def test_whole_blocks_have_the_bits_of_splits(
    name: str,
    window: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether one program takes all splits of a block, or programs share them."""
    heads, page_size = Heads(8, 2, 64), 16
    placed, num_slots = with_pages(random.Random(7), BATCHES[name](random.Random(3)), page_size)
    rows = packed(placed, page_size, CUDA)
    layer = random_layer(len(rows.positions), num_slots, heads, dtype).to(CUDA)
    poison(layer, page_size)
    monkeypatch.setattr(attention_triton, "FEWEST_WHOLE", NEVER)
    expected = attend(rows, layer, heads=heads, window=window)
    monkeypatch.setattr(attention_triton, "FEWEST_WHOLE", 0)
    for sharing, values in SHARING.items():
        for setting, value in zip(("CHAIN_KEYS", "FEWEST_CHAINS"), values, strict=True):
            monkeypatch.setattr(attention_triton, setting, value)
        assert torch.equal(attend(rows, layer, heads=heads, window=window), expected), sharing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["trees", pytest.param("tree levels", marks=pytest.mark.interpreter), "everything"]
)
def test_rows_that_share_a_program_keep_their_bits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, page_size = Heads(8, 2, 64), 16
    placed, num_slots = with_pages(random.Random(7), BATCHES[name](random.Random(3)), page_size)
    rows = packed(placed, page_size, CUDA)
    layer = random_layer(len(rows.positions), num_slots, heads, dtype).to(CUDA)
    poison(layer, page_size)
    monkeypatch.setattr(attention_triton, "FEWEST_WHOLE", NEVER)
    expected = attend(rows, layer, heads=heads)
    for own_rows in (3,) if IS_INTERPRETING else (1, 3):
        monkeypatch.setattr(attention_triton, "OWN_ROWS", own_rows)
        assert torch.equal(attend(rows, layer, heads=heads), expected), own_rows


@pytest.mark.parametrize("page_size", [1, 5, 32, 128])
def test_any_page_size(page_size: int) -> None:
    sequences = BATCHES["everything"](random.Random(4))
    check(sequences, Heads(4, 2, 64), torch.bfloat16, page_size=page_size)


@pytest.mark.parametrize("fewest_whole", [0, 160])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(4, 4, 64),
        Heads(6, 2, 80),
        Heads(7, 1, 96),
        Heads(32, 1, 64),
        Heads(16, 2, 128),
        Heads(4, 2, 256),
        Heads(4, 2, 8),
    ],
    ids=lambda heads: f"{heads.num_heads}-{heads.num_kv_heads}-{heads.head_dim}",
)
def test_any_heads(heads: Heads, fewest_whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "FEWEST_WHOLE", fewest_whole)
    check(BATCHES["everything"](random.Random(5)), heads, torch.float16, page_size=16)


@pytest.mark.parametrize("fewest_whole", [0, NEVER])
@pytest.mark.parametrize(
    ("head_dim", "page_size", "window"),
    some_interpreted(itertools.product([64, 96, 128, 256], [1, 5, 64], [33, 64]), [(64, 5, 33)]),
)
def test_any_window(
    head_dim: int, page_size: int, window: int, fewest_whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that begin within, before and behind what is seen: of tokens, trees and chunks."""
    monkeypatch.setattr(attention_triton, "FEWEST_WHOLE", fewest_whole)
    rng = random.Random(window)
    far, num_nodes, num_more = (140, 9, 5) if IS_INTERPRETING else (900, 20, 20)
    sequences = [
        *(chunk(start, 1) for start in (0, window - 2, window - 1, window, window + 1, far)),
        tree(rng, start=3, num_nodes=num_nodes // 2),
        tree(rng, start=window + 7, num_nodes=num_nodes, num_cached=6),
        chunk(0, window + num_more),
        chunk(window - 5, num_more + 4),
    ]
    check(sequences, Heads(4, 2, head_dim), torch.float16, page_size=page_size, window=window)


@pytest.mark.parametrize("fewest_whole", [0, 160])
@pytest.mark.parametrize("length", [2048, 8191, 32_768, 131_071])
def test_long_contexts(length: int, fewest_whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "FEWEST_WHOLE", fewest_whole)
    sequences = [
        chunk(length, 1),
        tree(random.Random(6), start=length - 9, num_nodes=12),
        chunk(length - 40, 40),
    ]
    heads = Heads(8, 2, 128)
    check(sequences, heads, torch.bfloat16, page_size=16, oracle_device=CUDA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_does_not_touch_a_bit(dtype: torch.dtype) -> None:
    """Together they are enough blocks for one program each, alone they are not."""
    rng, page_size = random.Random(8), 16
    sequences = [
        chunk(700, 1), tree(rng, start=333, num_nodes=31), chunk(2500, 1), chunk(20, 400),
        tree(rng, start=5, num_nodes=64), chunk(64, 9), *[chunk(100 + i, 1) for i in range(40)],
    ]  # fmt: skip
    placed, num_slots = with_pages(rng, sequences, page_size)
    rows = packed(placed, page_size, CUDA)
    layer = random_layer(len(rows.positions), num_slots, LLAMA, dtype).to(CUDA)
    poison(layer, page_size)
    together = attend(rows, layer, heads=LLAMA)
    start = 0
    for each in placed:
        end = start + len(each.token_ids)
        alone = replace_queries(layer, layer.queries[start:end])
        result = attend(packed([each], page_size, CUDA), alone, heads=LLAMA)
        assert torch.equal(result, together[start:end])
        start = end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 60, 64, 127, 500, 2040])
def test_tree_node_has_the_bits_of_the_plain_token(start: int, dtype: torch.dtype) -> None:
    """The path of each node is laid out as a plain sequence and its last token attends alone."""
    page_size, num_nodes = 16, 40
    sequences = [tree(random.Random(9), start=start, num_nodes=num_nodes)]
    [rows], num_slots = with_pages(random.Random(9), sequences, page_size)
    layer = random_layer(num_nodes, 2 * num_slots, LLAMA, dtype).to(CUDA)
    poison(layer, page_size)
    results = attend(packed([rows], page_size, CUDA), layer, heads=LLAMA)
    spare_pages = range(num_slots // page_size, 2 * num_slots // page_size)
    assert rows.tail_mask is not None
    for node, mask in enumerate(rows.tail_mask):
        seen = [*range(start), *(start + column for column, is_seen in enumerate(mask) if is_seen)]
        source = [rows.pages[i // page_size] * page_size + i % page_size for i in seen]
        first = spare_pages[0] * page_size
        for cache in (layer.keys, layer.values):
            cache[first : first + len(seen)] = cache[torch.tensor(source, device=CUDA)]
        plain = replace(chunk(len(seen) - 1, 1), pages=spare_pages)
        query = replace_queries(layer, layer.queries[node : node + 1])
        alone = attend(packed([plain], page_size, CUDA), query, heads=LLAMA)
        assert torch.equal(alone[0], results[node]), f"node {node} at depth {sum(mask)}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain tokens", "trees", "chunks", "everything"])
def test_narrow_cache_equals_the_plain_path(name: str, dtype: torch.dtype) -> None:
    placed, num_slots = with_pages(random.Random(7), BATCHES[name](random.Random(3)), 16)
    rows = packed(placed, 16, CPU)
    layer = random_layer(len(rows.positions), num_slots, LLAMA, dtype)
    factors = torch.exp2(torch.arange(16) % 5 - 4.0).view(2, 8)
    scales, slots = CacheScales(factors[0], factors[1]), torch.arange(num_slots)
    keys, values = (torch.zeros(num_slots, 8, 128).to(torch.float8_e4m3fn) for _ in range(2))
    store(keys, slots, layer.keys, scales.keys)
    store(values, slots, layer.values, scales.values)
    plan = plan_tiles(rows, sliding_window=None, num_query_groups=LLAMA.num_groups)
    expected = paged_attention(
        layer.queries.float(), keys, values, plan, scale=0.1, cache_scales=scales
    )
    for cache in (keys, values):
        cache.view(torch.uint8)[:16] = 0x7F  # not a number
    on_device = packed(placed, 16, CUDA)
    found = paged_attention(
        layer.queries.to(CUDA),
        keys.to(CUDA),
        values.to(CUDA),
        plan_attention(on_device, sliding_window=None, num_query_groups=LLAMA.num_groups),
        scale=0.1,
        cache_scales=CacheScales(*factors.to(CUDA)),
    )
    assert relative_error(found, expected) < LARGEST_ERROR[dtype]


@pytest.mark.interpreter
def test_a_visible_key_does_touch_the_result() -> None:
    """The control of the tests above."""
    [rows], num_slots = with_pages(random.Random(0), [chunk(100, 1)], 16)
    layer = random_layer(1, num_slots, LLAMA, torch.float32).to(CUDA)
    batch = packed([rows], 16, CUDA)
    before = attend(batch, layer, heads=LLAMA)
    layer.values[rows.pages[0] * 16] += 1.0
    assert not torch.equal(attend(batch, layer, heads=LLAMA), before)


def replace_queries(layer: Layer, queries: Tensor) -> Layer:
    return replace(layer, queries=queries.contiguous())
