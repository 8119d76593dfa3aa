"""What a plan reserves, known before there is one."""

from __future__ import annotations

import random

import pytest
import torch

from shared.kernels.split_plan import num_part_rows, plan_splits
from tests.helpers.attention_batches import chunk, packed, tree, with_pages


@pytest.mark.parametrize("groups", [1, 3, 4, 32])
@pytest.mark.parametrize("num_trees", [1, 3, 20])
def test_partial_results_are_held_for_as_many_rows_as_blocks_have(
    num_trees: int, groups: int
) -> None:
    rng = random.Random(num_trees)
    sequences = [tree(rng, start=7 * i, num_nodes=1 + i) for i in range(num_trees)]
    placed, _ = with_pages(rng, [*sequences, chunk(4, 1)], 4)
    rows = packed(placed, 4, torch.device("cpu"))
    blocks = plan_splits(rows, None, groups).parts.plain_blocks
    rows_per_block = blocks.tile // groups
    expected = len(blocks.counts) * rows_per_block
    assert num_part_rows(len(rows.positions), len(placed), groups) == expected
    assert int(blocks.counts.sum()) == len(rows.positions)
