"""The KV pool stores by slot and moves tokens in all layers at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.kernels.cache import load
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvLayout, KvPool

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, page_size=4, dtype=torch.float32)
CPU = torch.device("cpu")


def filled_pool() -> KvPool:
    pool = KvPool(LAYOUT, num_pages=4, device=CPU)
    generator = torch.Generator().manual_seed(3)
    for layer in range(LAYOUT.num_layers):
        keys, values = torch.randn(2, 16, 2, 4, generator=generator)
        pool.write(layer, torch.arange(16), keys, values)
    return pool


def test_new_pool_is_finite() -> None:
    pool = KvPool(LAYOUT, num_pages=4, device=CPU)
    assert all(tensor.eq(0).all() for tensor in (*pool.keys, *pool.values))


def test_write_touches_its_slots_of_its_layer_only() -> None:
    pool = filled_pool()
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    keys, values = torch.ones(2, 2, 4), torch.full((2, 2, 4), 2.0)
    pool.write(1, torch.tensor([9, 4]), keys, values)
    before[1][[9, 4]] = keys
    before[3 + 1][[9, 4]] = values
    for tensor, expected in zip((*pool.keys, *pool.values), before, strict=True):
        assert torch.equal(tensor, expected)


def narrow_pool() -> KvPool:
    scales = torch.tensor([0.5, 2.0]).repeat(2, LAYOUT.num_layers, 1)
    layout = replace(LAYOUT, dtype=torch.float8_e4m3fn)
    return KvPool(layout, num_pages=4, device=CPU, scales=scales)


def test_narrow_pool_stores_the_nearest_e4m3_of_each_head_and_moves_bytes() -> None:
    pool = narrow_pool()
    keys = torch.tensor([[[0.5, -1.0, 224.0, 1e6], [2.0, 3.9, 896.0, -1e6]]])
    pool.write(1, torch.tensor([5]), keys, keys / 2)
    pool.move(torch.tensor([5]), torch.tensor([7]))
    scales = pool.scales[1]
    assert scales is not None
    found = load(pool.keys[1], torch.tensor([7]), scales.keys)
    expected = [[0.5, -1.0, 224.0, 224.0], [2.0, 4.0, 896.0, -896.0]]
    assert found.tolist() == [expected]
    assert load(pool.values[1], torch.tensor([7]), scales.values)[0, 0, 2] == 112.0
    assert pool.keys[0].float().eq(0).all()


def test_narrow_pool_takes_a_quarter_of_the_bytes() -> None:
    assert narrow_pool().layout.page_size_bytes * 4 == LAYOUT.page_size_bytes


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([7, 9], [5, 6]),
        ([6, 7, 8], [5, 6, 7]),
        ([5, 6, 7], [6, 7, 8]),
        ([5, 6], [6, 5]),
        ([5], [5]),
        ([], []),
    ],
)
def test_move_reads_everything_before_it_writes(sources: list[int], targets: list[int]) -> None:
    pool = filled_pool()
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    pool.move(torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64))
    for tensor, old in zip((*pool.keys, *pool.values), before, strict=True):
        expected = old.clone()
        for source, target in zip(sources, targets, strict=True):
            expected[target] = old[source]
        assert torch.equal(tensor, expected)


def test_a_rank_reads_and_writes_its_own_pages_alone() -> None:
    pool = KvPool(LAYOUT, num_pages=4, device=CPU, rank=1, num_ranks=3)
    mask = [[True, False], [True, True]]
    sequences = [
        SequenceRows.causal([1, 2], 1, [3]),
        SequenceRows.causal([3], 5, [5, 6]),
        SequenceRows([4, 5], [4, 5], 4, [9, 10], 4, mask, ()),
        SequenceRows([6, 7], [4, 5], 4, [7, 6], 4, mask, ()),
    ]
    batch = build_batch(sequences, page_size=4, device=CPU)
    own = pool.own(replace(batch, extents=())).batch
    assert own.page_table.tolist() == [[0, 0], [1, 2], [0, 0], [3, 2]]
    assert own.slots.tolist() == [0, 0, 9, 0, 0, 8, 9]
    assert own.kv_lengths.tolist() == [0, 6, 0, 6]
    assert own.prefix_lengths.tolist() == [0, 5, 0, 4]
    assert own.is_causal.tolist() == [True, True, True, False]
    assert pool.num_leased_pages == 12


def test_rows_of_other_ranks_are_left_out_where_the_host_knows_them() -> None:
    prompt = SequenceRows.causal(range(28), 5, [*range(8, 17)])
    sequences = [
        SequenceRows.causal([3], 5, [5, 6]),
        prompt,
        replace(prompt, pages=[5, 7, 6, *range(1, 7)]),
        SequenceRows.causal([4, 5], 1, [3]),
    ]
    batch = build_batch(sequences, page_size=4, device=CPU)
    own = KvPool(LAYOUT, num_pages=4, device=CPU, rank=1, num_ranks=4).own(batch)
    assert own.row_indices is not None
    assert own.row_indices.tolist() == [0, *range(29, 57)]
    assert own.batch.positions.tolist() == [5, *range(5, 33)]
    assert own.batch.query_starts.tolist() == [0, 1, 29]
    assert (own.batch.max_query_length, own.batch.num_prompt_keys) == (28, 33)
    whole = own.scatter(own.select(torch.arange(1.0, 60.0).view(59, 1)))
    assert whole.flatten().tolist() == [1.0, *[0.0] * 28, *range(30, 58), 0.0, 0.0]
    # Who has none computes the fewest.
    nobody = KvPool(LAYOUT, num_pages=4, device=CPU, rank=3, num_ranks=4).own(batch)
    assert nobody.row_indices is not None
    assert nobody.row_indices.tolist() == [0]
    assert nobody.batch.kv_lengths.tolist() == [0]


def test_a_rank_moves_its_own_tokens_alone() -> None:
    pool = KvPool(LAYOUT, num_pages=4, device=CPU, rank=1, num_ranks=3)
    pool.storage.copy_(filled_pool().storage)
    expected = pool.storage.clone()
    expected[:, :, 6] = expected[:, :, 9]
    # Of rank 0, of this one, of rank 2, and of a row that nobody has.
    pool.move(torch.tensor([7, 16 + 9, 41, 0]), torch.tensor([6, 16 + 6, 40, 0]))
    assert torch.equal(pool.storage, expected)


def test_the_one_pool_of_all_pages_takes_batches_as_they_are() -> None:
    batch = build_batch([SequenceRows.causal([1], 0, [2])], page_size=4, device=CPU)
    own = filled_pool().own(batch)
    assert own.batch is batch
    assert own.row_indices is None
