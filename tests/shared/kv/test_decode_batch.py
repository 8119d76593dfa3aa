"""Plain decode is packed into the same tensors as everything else, whatever happened before."""

from __future__ import annotations

import random
from dataclasses import fields

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch, SequenceRows, build_batch
from shared.kv.decode_batch import DecodeBatches
from shared.kv.leases import KvLease, KvLeases

CPU = torch.device("cpu")
PAGE_SIZE = 4


def _expected(token_ids: list[int], starts: list[int], leases: list[KvLease]) -> ForwardBatch:
    rows = [
        SequenceRows([token], [start], start, lease.pages, start, None, [0])
        for token, start, lease in zip(token_ids, starts, leases, strict=True)
    ]
    return build_batch(rows, page_size=PAGE_SIZE, device=CPU)


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
