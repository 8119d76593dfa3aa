"""Rows of a round lie in memory as kernels read them, whatever the number of sequences."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.runtime.round_batches import RoundBatches, RoundShape
from shared.runtime.round_state import RoundState
from shared.speculation.tree import Children, TreeGrowth
from shared.tokens import TreeShape

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_slots", [1, 3])
def test_tensors_of_a_beam_are_contiguous(num_slots: int) -> None:
    tree = TreeShape(3, 2, 7)
    shape = RoundShape.of(tree, draft_vocab_size=9, max_context_tokens=40)
    state = RoundState.empty(num_slots, max_open_rows=4, num_pages=12, device=CPU)
    growth = TreeGrowth(tree)
    tokens = torch.arange(2).expand(num_slots, 1, 2)
    growth.add(Children(tokens, torch.zeros(num_slots, 1, 2)))
    batch = RoundBatches(shape, 4).of_beam(state, growth.select_beam(), 0)
    assert all(each.is_contiguous() for each in _tensors(batch))
    assert batch.positions.tolist() == [1] * (2 * num_slots)


def _tensors(batch: ForwardBatch) -> list[Tensor]:
    values = (getattr(batch, each.name) for each in dataclasses.fields(batch))
    return [each for each in values if isinstance(each, Tensor)]
