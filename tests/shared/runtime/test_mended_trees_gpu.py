"""What another process wrote is read as trees, whatever it is; the kernel reads as plain torch."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from shared.runtime.round_batches import RoundBatches, RoundShape
from shared.runtime.round_head import mended_rows
from shared.runtime.round_state import RoundState, SlotSequence
from shared.speculation.tree import NO_TOKEN, TreeRows
from shared.tokens import SamplingParams, TreeShape
from tests.helpers.kernel_device import kernel_device

NUM_SLOTS, PAGE_SIZE, VOCAB_SIZE = 4, 4, 6
SHAPES = [TreeShape(1, 1, 2), TreeShape(5, 1, 6), TreeShape(3, 3, 12)]
SIZES = {shape: RoundShape.of(shape, draft_vocab_size=9, max_context_tokens=40) for shape in SHAPES}


def _written(source: random.Random, num_rows: int, device: torch.device) -> Tensor:
    """Anything: tokens and parents that are far out, cycles, twins."""

    def number() -> int:
        kind = source.random()
        if kind < 0.1:
            return source.choice([-(2**62), 2**62, -1, -7])
        return source.randrange(num_rows if kind < 0.6 else 3)

    numbers = [number() for _ in range(NUM_SLOTS * 2 * num_rows)]
    return torch.tensor(numbers, device=device).view(NUM_SLOTS, 2, num_rows)


def _mended(written: Tensor, roots: Tensor, shape: TreeShape) -> TreeRows:
    return mended_rows(written[:, 0], written[:, 1], roots, shape, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_read_is_a_tree(shape: TreeShape) -> None:
    source, num_rows = random.Random(1), SIZES[shape].num_tree_rows
    num_nodes = 0
    for _ in range(60):
        tree = _mended(_written(source, num_rows, torch.device("cpu")), torch.arange(4), shape)
        for slot in range(NUM_SLOTS):
            tokens, parents = tree.token_ids[slot].tolist(), tree.parents[slot].tolist()
            assert tokens[0] == slot
            assert parents[0] == 0
            seen = set()
            for row in range(1, num_rows):
                assert 0 <= parents[row] < row
                assert shape.topk > 1 or parents[row] == row - 1, "it is computed as one run"
                if tokens[row] == NO_TOKEN:
                    continue
                num_nodes += 1
                assert 0 <= tokens[row] < VOCAB_SIZE
                assert (parents[row], tokens[row]) not in seen, "one of two would be accepted twice"
                seen.add((parents[row], tokens[row]))
                path = [row]
                while path[-1]:
                    path.append(parents[path[-1]])
                assert len(path) - 1 <= shape.num_steps
                assert tree.depths[slot, row] == len(path) - 1
                assert tree.visible[slot, row].nonzero().flatten().tolist() == sorted(path)
    assert num_nodes > 100


def test_a_tree_stays_as_it_is() -> None:
    tokens = torch.tensor([[9, 1, 2, 1, 3, NO_TOKEN]])
    parents = torch.tensor([[0, 0, 0, 1, 3, 0]])
    shape = TreeShape(3, 3, 6)
    found = mended_rows(tokens, parents, torch.tensor([9]), shape, vocab_size=VOCAB_SIZE)
    assert found.token_ids.tolist() == tokens.tolist()
    assert found.parents.tolist() == parents.tolist()
    assert found.depths.tolist() == [[0, 1, 1, 2, 3, 1]]


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_reads_as_plain_torch(shape: TreeShape) -> None:
    from shared.runtime.round_fused import read_trees_fused

    device, source, sizes = kernel_device(), random.Random(2), SIZES[shape]
    batches = RoundBatches(sizes, PAGE_SIZE)
    state = RoundState.empty(
        NUM_SLOTS,
        max_open_rows=sizes.max_committed,
        num_pages=sizes.num_pages(PAGE_SIZE),
        device=device,
    )
    pages = [source.sample(range(1, 99), sizes.num_pages(PAGE_SIZE)) for _ in range(3)]
    state.place(
        {
            slot: SlotSequence(2 + 7 * slot, 3 + slot, SamplingParams(), own, ())
            for slot, own in enumerate(pages)
        }
    )
    for _ in range(4):
        written = _written(source, sizes.num_tree_rows, device)
        found = read_trees_fused(written, state, batches, VOCAB_SIZE)
        expected = batches.of_trees(state, _mended(written, state.roots, shape))
        for part in ("rows", "batch"):
            for each in fields(getattr(expected, part)):
                wanted = getattr(getattr(expected, part), each.name)
                if isinstance(wanted, Tensor):
                    assert torch.equal(getattr(getattr(found, part), each.name), wanted), each.name
