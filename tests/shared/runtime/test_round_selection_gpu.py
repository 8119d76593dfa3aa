"""The kernel selects and lays out what plain torch does, whatever the state and the trees."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch

from shared.runtime.round_batches import RoundBatches, RoundShape, RoundTree
from shared.runtime.round_selection import (
    MAX_PREPARED,
    Ending,
    PreparedBlock,
    PreparedTree,
    RoundSelection,
)
from shared.runtime.round_state import ENDED, OPEN, TAIL, RoundSampling, RoundState, SlotSequence
from shared.runtime.selection_runner import MAX_TREE_DEPTH, MAX_TREE_ROWS, PLAIN_SHAPE
from shared.tokens import SamplingParams, TokenTree, TreeShape
from tests.helpers.kernel_device import kernel_device

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]

NUM_SLOTS, PAGE_SIZE, MAX_LENGTH = 5, 4, 60
SHAPES = [
    PLAIN_SHAPE,
    TreeShape(1, 1, 2),
    TreeShape(5, 1, 6),
    TreeShape(4, 2, 12),
    TreeShape(32, 2, 64),
]


def _tree(source: random.Random, shape: TreeShape) -> TokenTree:
    parents: list[int | None] = []
    depths: list[int] = []
    for node in range(source.randint(0, shape.num_draft_tokens - 1)):
        if shape.topk == 1:
            parent = node - 1 if node else None
        else:
            inner = [each for each in range(node) if depths[each] < shape.num_steps]
            parent = source.choice([None, *inner])
        parents.append(parent)
        depths.append(1 if parent is None else depths[parent] + 1)
    tokens = [source.randrange(6) for _ in parents]
    return TokenTree(tuple(tokens), tuple(parents))


def _state(source: random.Random, num_pages: int, device: torch.device) -> RoundState:
    state = RoundState.empty(
        NUM_SLOTS, max_open_rows=MAX_TREE_DEPTH + 1, num_pages=num_pages, device=device
    )
    pages = source.sample(range(1, 1000), NUM_SLOTS * num_pages)
    for slot in range(NUM_SLOTS - 1):  # the last one is empty
        own = pages[slot * num_pages : (slot + 1) * num_pages]
        length = source.randint(2, MAX_LENGTH)
        sequence = SlotSequence(length, 3, SamplingParams(), own, ())
        state.place({slot: sequence})
        num_open = source.randint(1, MAX_TREE_DEPTH + 1)
        state.numbers[slot, OPEN] = num_open
        state.numbers[slot, ENDED] = source.randrange(4)
        state.numbers[slot, TAIL + num_open - 1] = source.randrange(6)
    return state


def _prepared(
    source: random.Random, state: RoundState, shape: TreeShape
) -> dict[int, list[PreparedTree]]:
    """Some fit, some are for another length, row or token."""
    lengths, rows, roots = (
        each.tolist() for each in (state.lengths, state.ended_rows, state.roots)
    )
    found = {}
    for slot in source.sample(range(NUM_SLOTS), source.randint(0, NUM_SLOTS)):
        trees = []
        for _ in range(source.choice([0, 1, 3, MAX_PREPARED])):
            ending = Ending(
                rows[slot] + (source.random() < 0.4), roots[slot] + (source.random() < 0.4)
            )
            num_tokens = lengths[slot] + (source.random() < 0.2)
            is_sure = source.random() < 0.1
            trees.append(
                PreparedTree(num_tokens, _tree(source, shape), None if is_sure else ending)
            )
        found[slot] = trees
    return found


def _tensors(tree: RoundTree) -> dict[str, torch.Tensor]:
    return {
        each.name: value
        for part in (tree.rows, tree.batch)
        for each in fields(part)
        if isinstance(value := getattr(part, each.name), torch.Tensor)
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_selects_what_plain_torch_does(shape: TreeShape) -> None:
    # Triton is not installed where there is no CUDA.
    from shared.runtime.round_fused import FusedRoundSelection

    source, device = random.Random(str(shape)), kernel_device()
    sizes = RoundShape(shape, shape.num_draft_tokens, MAX_LENGTH + MAX_TREE_ROWS)
    batches = RoundBatches(sizes, PAGE_SIZE)
    block = PreparedBlock(NUM_SLOTS, MAX_TREE_ROWS, device)
    num_found = 0
    for _ in range(12):
        state = _state(source, -(-sizes.max_kv_length // PAGE_SIZE), device)
        block.upload(_prepared(source, state, shape), shape.num_draft_tokens)
        expected = RoundSelection(block, batches).grow(state, RoundSampling.GREEDY)
        is_active = state.is_active.clone()
        state.is_active.fill_(7)
        found = FusedRoundSelection(block, batches).grow(state, RoundSampling.GREEDY)
        torch.testing.assert_close(state.is_active, is_active, rtol=0, atol=0)
        for name, value in _tensors(expected).items():
            torch.testing.assert_close(_tensors(found)[name], value, rtol=0, atol=0, msg=name)
        num_found += int(is_active.sum())
    assert 0 < num_found < 12 * NUM_SLOTS
