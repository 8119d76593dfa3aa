"""The plan kernels against their plain versions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.split_plan import PagedRows, cuts_of, parts_of_rows, plan_splits
from shared.kv.batch import SequenceRows
from tests.helpers.attention_batches import chunk, packed, tree, with_pages
from tests.helpers.kernel_device import kernel_device

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
CPU = torch.device("cpu")


def sequences(kind: str) -> list[SequenceRows]:
    rng = random.Random(2)
    trees = [tree(rng, start=9 * i, num_nodes=1 + 3 * i, num_cached=i) for i in range(9)]
    chunks = [chunk(5 * i, 1 + i * i) for i in range(12)]
    return {"trees": trees, "chunks": chunks, "both": [*trees, *chunks], "one": [chunk(3, 1)]}[kind]


def both(kind: str) -> tuple[PagedRows, PagedRows]:
    placed, _ = with_pages(random.Random(3), sequences(kind), 4)
    return packed(placed, 4, CPU), packed(placed, 4, kernel_device())


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        # Those of trees and chunks are many: the interpreter has a few of them.
        *(("both", groups) for groups in ((4,) if IS_INTERPRETING else (1, 3, 4, 32))),
        *(("trees", groups) for groups in (1, 4, 32)),
        ("chunks", 3),
        ("one", 1),
    ],
)
def test_plan_has_the_blocks_of_the_plain_one(kind: str, groups: int) -> None:
    on_cpu, on_gpu = both(kind)
    expected = parts_of_rows.plain(on_cpu, *cuts_of(on_cpu, groups))
    found = plan_splits(on_gpu, None, groups).parts
    assert torch.equal(found.row_lengths.cpu(), expected.row_lengths)
    assert torch.equal(found.shared_lengths.cpu(), expected.shared_lengths)
    assert torch.equal(found.counters.cpu(), expected.counters)
    assert (found.chunk_blocks is None) == (expected.chunk_blocks is None)
    pairs = [(found.plain_blocks, expected.plain_blocks)]
    if found.chunk_blocks is not None and expected.chunk_blocks is not None:
        pairs.append((found.chunk_blocks, expected.chunk_blocks))
    for blocks, others in pairs:
        used = others.counts > 0
        assert torch.equal(blocks.counts.cpu(), others.counts)
        assert torch.equal(blocks.sequences.cpu()[used], others.sequences[used])
        assert torch.equal(blocks.first_rows.cpu()[used], others.first_rows[used])


@pytest.mark.parametrize("kind", ["trees"] if IS_INTERPRETING else ["trees", "both"])
def test_visible_tail_keys_are_those_of_the_plain_plan(kind: str) -> None:
    on_cpu, on_gpu = both(kind)
    expected = parts_of_rows.plain(on_cpu, *cuts_of(on_cpu, 2)).tail_slots
    found = plan_splits(on_gpu, None, 2).parts.tail_slots
    assert expected is not None
    assert found is not None
    assert on_cpu.tail_mask is not None
    for row, count in enumerate(on_cpu.tail_mask.sum(1).tolist()):
        assert torch.equal(found[row, :count].cpu(), expected[row, :count])


def test_rows_past_the_last_sequence_see_nothing() -> None:
    _, rows = both("one")
    padded = replace(rows, positions=rows.positions.repeat(4))
    assert plan_splits(padded, None, 2).parts.row_lengths.tolist() == [4, 0, 0, 0]
