"""Paged attention equals a loop over single rows and keys, whatever the batch looks like."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.kernels import attention
from shared.kernels.attention import paged_attention, plan_attention
from shared.kv.batch import ForwardBatch, SequenceRows, build_batch

CPU = torch.device("cpu")
HEAD_DIM = 8
NUM_PAGES = 40


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random_tree(rng: random.Random, num_nodes: int) -> list[int | None]:
    return [rng.choice([None, *range(node)]) for node in range(num_nodes)]


def tree_rows(
    rng: random.Random, *, prefix: int, num_nodes: int, first_row: int, pages: list[int]
) -> SequenceRows:
    """Rows `first_row …` of a tree whose earlier nodes are already in the cache."""
    parents = random_tree(rng, num_nodes)
    depths: list[int] = []
    masks: list[list[bool]] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent is None else depths[parent] + 1)
        mask = [False] * num_nodes if parent is None else list(masks[parent])
        mask[node] = True
        masks.append(mask)
    nodes = range(first_row, num_nodes)
    return SequenceRows(
        token_ids=[0] * len(nodes),
        positions=[prefix + depths[node] for node in nodes],
        kv_start=prefix + first_row,
        pages=pages,
        prefix_length=prefix,
        tail_mask=[masks[node] for node in nodes],
        logit_rows=[],
    )


def causal_rows(*, start: int, num_rows: int, pages: list[int]) -> SequenceRows:
    return SequenceRows(
        token_ids=[0] * num_rows,
        positions=range(start, start + num_rows),
        kv_start=start,
        pages=pages,
        prefix_length=start,
        tail_mask=None,
        logit_rows=[],
    )


def batch_of(kind: str, *, seed: int, page_size: int) -> list[SequenceRows]:
    rng = random.Random(seed)
    order = rng.sample(range(1, NUM_PAGES), NUM_PAGES - 1)
    pages = [order[i::3] for i in range(3)]
    rows: list[SequenceRows] = []
    for own in pages:
        start = rng.randint(0, 9 * page_size // 2)
        is_tree = kind == "trees" or (kind == "mixed" and rng.random() < 0.5)
        if is_tree:
            num_nodes = rng.randint(1, 6)
            first = rng.randint(0, num_nodes - 1)
            rows.append(
                tree_rows(rng, prefix=start, num_nodes=num_nodes, first_row=first, pages=own)
            )
        else:
            rows.append(causal_rows(start=start, num_rows=rng.randint(1, 9), pages=own))
    return rows


def loop_attention(
    sequences: list[SequenceRows],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    page_size: int,
    sliding_window: int | None,
) -> Tensor:
    """Attention as its definition reads: one row, one head, one visible key at a time."""
    results = []
    num_groups = queries.shape[1] // keys.shape[1]
    for rows in sequences:
        for row in range(len(rows.token_ids)):
            query = queries[len(results)]
            slots = [
                rows.pages[index // page_size] * page_size + index % page_size
                for index in visible_indices(rows, row, sliding_window)
            ]
            heads = []
            for head in range(queries.shape[1]):
                cached = keys[slots, head // num_groups].double()
                scores = cached @ query[head].double() / math.sqrt(HEAD_DIM)
                weights = torch.softmax(scores, 0)
                heads.append(weights @ values[slots, head // num_groups].double())
            results.append(torch.stack(heads).float())
    return torch.stack(results)


def visible_indices(rows: SequenceRows, row: int, sliding_window: int | None) -> list[int]:
    oldest = -1 if sliding_window is None else rows.positions[row] - sliding_window
    prefix = [index for index in range(rows.prefix_length) if index > oldest]
    if rows.tail_mask is None:
        own = rows.kv_start + row
        return prefix + [i for i in range(rows.prefix_length, own + 1) if i > oldest]
    tail = [i for i, sees in enumerate(rows.tail_mask[row]) if sees]
    return prefix + [rows.prefix_length + index for index in tail]


def random_cache(page_size: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (NUM_PAGES * page_size, num_kv_heads, HEAD_DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["causal", "trees", "mixed"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("sliding_window", [None, 7])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_equals_a_loop(
    seed: int,
    kind: str,
    num_heads: int,
    num_kv_heads: int,
    sliding_window: int | None,
    page_size: int,
) -> None:
    sequences = batch_of(kind, seed=seed, page_size=page_size)
    sequences = [rows for rows in sequences if fits(rows, page_size)]
    batch = build_batch(sequences, page_size=page_size, device=CPU)
    keys, values = random_cache(page_size, num_kv_heads)
    queries = torch.randn(len(batch.token_ids), num_heads, HEAD_DIM)
    plan = plan_attention(
        batch,
        sliding_window=sliding_window,
        num_query_groups=num_heads // num_kv_heads,
    )
    actual = paged_attention(queries, keys, values, plan, scale=HEAD_DIM**-0.5)
    expected = loop_attention(
        sequences, queries, keys, values, page_size=page_size, sliding_window=sliding_window
    )
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def fits(rows: SequenceRows, page_size: int) -> bool:
    return rows.kv_start + len(rows.token_ids) <= len(rows.pages) * page_size


@pytest.mark.parametrize("kind", ["causal", "trees", "mixed"])
@pytest.mark.parametrize("sliding_window", [None, 7])
def test_one_padded_tile_equals_a_tile_for_each_shape(
    kind: str, sliding_window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = batch_of(kind, seed=11, page_size=4)
    rows = build_batch(sequences, page_size=4, device=CPU)
    keys, values = random_cache(4, 2)
    queries = torch.randn(len(rows.positions), 4, HEAD_DIM)
    by_shape = plan_attention(rows, sliding_window=sliding_window, num_query_groups=2)
    monkeypatch.setattr(attention, "_plan_by_shape", attention._plan_as_one_tile)
    padded = plan_attention(rows, sliding_window=sliding_window, num_query_groups=2)
    assert len({each.bias.shape for each in by_shape.tiles}) == len(by_shape.tiles)
    assert len(padded.tiles) == 1
    torch.testing.assert_close(
        paged_attention(queries, keys, values, by_shape, scale=1.0),
        paged_attention(queries, keys, values, padded, scale=1.0),
    )


def test_other_sequences_do_not_touch_a_bit() -> None:
    mixed, trees = (batch_of(kind, seed=2, page_size=4) for kind in ("mixed", "trees"))
    sequences = [*mixed, *trees]
    keys, values = random_cache(4, 2)
    batch = build_batch(sequences, page_size=4, device=CPU)
    queries = torch.randn(len(batch.token_ids), 4, HEAD_DIM)
    plan = plan_attention(batch, sliding_window=None, num_query_groups=2)
    assert len(plan.tiles) < len(sequences), "none shares a tile"
    together = attend(batch, queries, keys, values)
    start = 0
    for rows in sequences:
        end = start + len(rows.token_ids)
        alone = build_batch([rows], page_size=4, device=CPU)
        assert torch.equal(attend(alone, queries[start:end], keys, values), together[start:end])
        start = end


def test_hidden_keys_do_not_touch_the_result() -> None:
    """A control for the masks: changing a visible key does change the result."""
    rows = tree_rows(random.Random(4), prefix=6, num_nodes=5, first_row=0, pages=[3, 7, 2])
    batch = build_batch([rows], page_size=4, device=CPU)
    keys, values = random_cache(4, 2)
    queries = torch.randn(5, 4, HEAD_DIM)
    before = attend(batch, queries, keys, values)
    hidden_slot, visible_slot = 3 * 4 - 1, 3 * 4
    values[hidden_slot] = 100.0
    assert torch.equal(attend(batch, queries, keys, values), before)
    values[visible_slot] = 100.0
    assert not torch.allclose(attend(batch, queries, keys, values), before)


def test_prefix_above_the_first_row_is_visible_to_causal_rows() -> None:
    rows = causal_rows(start=3, num_rows=4, pages=[5, 6])
    batch = build_batch([replace(rows, prefix_length=5)], page_size=4, device=CPU)
    keys, values = random_cache(4, 1)
    queries = torch.randn(4, 2, HEAD_DIM)
    expected = loop_attention(
        [replace(rows, prefix_length=5)],
        queries,
        keys,
        values,
        page_size=4,
        sliding_window=None,
    )
    torch.testing.assert_close(
        attend(batch, queries, keys, values, scale=HEAD_DIM**-0.5), expected, atol=1e-5, rtol=1e-5
    )


def test_tree_deeper_than_the_sliding_window_is_refused() -> None:
    rows = tree_rows(random.Random(0), prefix=2, num_nodes=1, first_row=0, pages=[1, 2])
    batch = build_batch([replace(rows, positions=[2 + 7])], page_size=4, device=CPU)
    with pytest.raises(AssertionError, match="deeper than the sliding window of 7"):
        plan_attention(batch, sliding_window=7, num_query_groups=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    batch = build_batch(batch_of("mixed", seed=9, page_size=4), page_size=4, device=CPU)
    keys, values = (tensor.to(dtype) for tensor in random_cache(4, 2))
    queries = torch.randn(len(batch.token_ids), 4, HEAD_DIM).to(dtype)
    result = attend(batch, queries, keys, values)
    exact = attend(batch, queries.float(), keys.float(), values.float())
    assert result.dtype == dtype
    assert torch.equal(result, exact.to(dtype))


def attend(
    batch: ForwardBatch, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float = 1.0
) -> Tensor:
    groups = queries.shape[1] // keys.shape[1]
    plan = plan_attention(batch, sliding_window=None, num_query_groups=groups)
    return paged_attention(queries, keys, values, plan, scale=scale)
