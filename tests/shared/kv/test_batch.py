"""Rows of several sequences are packed into the tensors of one forward; plain decode into the same,
whatever happened before."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import torch
from torch import Tensor

from shared.kv.batch import DecodeBatches, ForwardBatch, SequenceRows, build_batch
from shared.kv.leases import KvLease, KvLeases

CPU = torch.device("cpu")
CHUNK = SequenceRows(
    token_ids=[5, 6, 7],
    positions=[2, 3, 4],
    kv_start=2,
    pages=[9, 3],
    prefix_length=2,
    tail_mask=None,
    logit_rows=[2],
)
TREE = SequenceRows(
    token_ids=[1, 2],
    positions=[6, 6],
    kv_start=6,
    pages=[4, 8],
    prefix_length=5,
    tail_mask=[[True, True, False], [True, False, True]],
    logit_rows=[1, 0],
)


def test_rows_are_laid_end_to_end_and_slots_follow_the_page_table() -> None:
    batch = build_batch([CHUNK, TREE], page_size=4, device=CPU)
    assert batch.token_ids.tolist() == [5, 6, 7, 1, 2]
    assert batch.positions.tolist() == [2, 3, 4, 6, 6]
    assert batch.slots.tolist() == [9 * 4 + 2, 9 * 4 + 3, 3 * 4, 8 * 4 + 2, 8 * 4 + 3]
    assert batch.query_starts.tolist() == [0, 3, 5]
    assert batch.kv_lengths.tolist() == [5, 8]
    assert batch.prefix_lengths.tolist() == [2, 5]
    assert batch.logit_rows.tolist() == [2, 4, 3]
    assert (batch.max_query_length, batch.max_kv_length) == (3, 8)


def test_tail_mask_belongs_to_the_rows_of_trees() -> None:
    batch = build_batch([CHUNK, TREE], page_size=4, device=CPU)
    assert batch.is_causal.tolist() == [True, False]
    assert batch.tail_mask is not None
    assert batch.tail_mask[3:].tolist() == [[True, True, False], [True, False, True]]


def test_causal_rows_alone_need_no_tail_mask() -> None:
    assert build_batch([CHUNK], page_size=4, device=CPU).tail_mask is None


def test_shorter_page_tables_are_padded_with_page_zero() -> None:
    long = SequenceRows([1], [9], 9, [1, 2, 5], 9, None, [0])
    batch = build_batch([CHUNK, long], page_size=4, device=CPU)
    assert batch.page_table.tolist() == [[9, 3, 0], [1, 2, 5]]


PAGE_SIZE = 4


def _expected(token_ids: list[int], starts: list[int], leases: list[KvLease]) -> ForwardBatch:
    rows = [
        SequenceRows([token], [start], start, lease.pages, start, None, [0])
        for token, start, lease in zip(token_ids, starts, leases, strict=True)
    ]
    return replace(build_batch(rows, page_size=PAGE_SIZE, device=CPU), extents=())


def _check(batches: DecodeBatches, starts: list[int], leases: list[KvLease]) -> None:
    token_ids = [3 * start + 1 for start in starts]
    found, expected = (
        batches.build(token_ids, starts, leases),
        _expected(token_ids, starts, leases),
    )
    for each in fields(ForwardBatch):
        mine, theirs = getattr(found, each.name), getattr(expected, each.name)
        if isinstance(theirs, Tensor):
            assert mine.dtype == theirs.dtype, each.name
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        else:
            assert mine == theirs, each.name


def _open(owner: KvLeases, num_tokens: int, first_token: int = 0) -> KvLease:
    lease = owner.open(range(first_token, first_token + num_tokens))
    owner.grow(lease, num_tokens)
    return lease


def test_batches_of_a_random_life_are_those_of_build_batch() -> None:
    """Sequences grow, join, leave and change places."""
    rng = random.Random(0)
    owner, batches = KvLeases(2000, PAGE_SIZE), DecodeBatches(PAGE_SIZE, CPU)
    live: list[tuple[KvLease, int]] = []
    for step in range(300):
        if len(live) < 2 or rng.random() < 0.1:
            length = rng.choice([1, 5, 40, 300])
            live.append((_open(owner, length, first_token=1000 * step), length))
        if len(live) > 2 and rng.random() < 0.1:
            owner.close(live.pop(rng.randrange(len(live)))[0], ())
        if rng.random() < 0.05:
            rng.shuffle(live)
        live = [(lease, length + 1) for lease, length in live]
        for lease, length in live:
            owner.grow(lease, length)
        _check(batches, [length - 1 for _, length in live], [lease for lease, _ in live])


def test_pages_that_publishing_replaces_are_followed() -> None:
    """Two sequences compute one prompt; the second to publish takes over the first one's pages."""
    owner, batches = KvLeases(50, PAGE_SIZE), DecodeBatches(PAGE_SIZE, CPU)
    prompt = list(range(9))
    leases = [_open(owner, 10), _open(owner, 10)]
    _check(batches, [9, 9], leases)
    before = list(leases[1].pages)
    for lease in leases:
        owner.publish(lease, prompt)
    assert leases[1].pages != before
    _check(batches, [9, 9], leases)
