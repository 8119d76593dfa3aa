"""The kernels of a gated delta rule against their plain versions, and against themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shared.kernels.delta_layer import (
    NOWHERE,
    STAMP_SIZE,
    DeltaLanes,
    DeltaPrompts,
    advance_lanes,
    advance_prompts,
    gated_norm,
    store_inputs,
)
from shared.kernels.delta_rule import CHUNK, DeltaShape, DeltaWeights
from tests.helpers.kernel_device import kernel_device

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
CUDA = kernel_device()
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NUM_SLOTS, NUM_STATES = 40, 5
SHAPES = {
    "as many heads": DeltaShape(2, 2, 8, 16, 4),
    "grouped, odd sizes": DeltaShape(2, 6, 12, 20, 3),
    "one token sees itself": DeltaShape(1, 2, 16, 8, 1),
    "Qwen3-Next's head": DeltaShape(1, 2, 128, 128, 4),
}
SHAPE = SHAPES["grouped, odd sizes"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@dataclass
class Layer:
    """A layer with random stored inputs and states.

    Attributes:
        stored: as a cache has them, of several of its layers, keys and values.
    """

    shape: DeltaShape
    weights: DeltaWeights
    stored: Tensor
    states: Tensor

    @classmethod
    def random(cls, shape: DeltaShape, dtype: torch.dtype, num_slots: int = NUM_SLOTS) -> Layer:
        weights = DeltaWeights(
            torch.randn(shape.num_channels, shape.window, device=CUDA).to(dtype),
            torch.randn(shape.num_value_heads, device=CUDA),
            torch.randn(shape.num_value_heads, device=CUDA),
        )
        # Of a head's size that no channel's begins with.
        num_heads, head_dim = 2, 12
        each = -(-(STAMP_SIZE + shape.num_inputs) // (2 * num_heads * head_dim))
        storage = torch.randn(2, each + 3, num_slots, num_heads, head_dim, device=CUDA).to(dtype)
        sizes = shape.num_value_heads, shape.key_dim, shape.value_dim
        states = torch.randn(NUM_STATES, *sizes, device=CUDA) / shape.key_dim**0.5
        return cls(shape, weights, storage[:, 2 : 2 + each], states)

    def advanced(
        self, lanes: DeltaLanes, num_rows: int, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the states, in place of ours or others, and what rows read."""
        return self._run(advance_lanes, lanes, num_rows, states)

    def plainly_advanced(self, lanes: DeltaLanes, num_rows: int) -> tuple[Tensor, Tensor]:
        return self._run(advance_lanes.plain, lanes, num_rows, None)

    def prompts_advanced(self, prompts: DeltaPrompts, num_rows: int) -> tuple[Tensor, Tensor]:
        return self._run(advance_prompts, prompts, num_rows, None)

    def prompts_plainly_advanced(
        self, prompts: DeltaPrompts, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        return self._run(advance_prompts.plain, prompts, num_rows, None)

    def _run(self, advance, lanes, num_rows, states):  # type: ignore[no-untyped-def]
        states = (self.states if states is None else states).clone()
        read = torch.zeros(num_rows, self.shape.value_size, dtype=self.stored.dtype, device=CUDA)
        advance(self.stored, lanes, states, read, self.shape, self.weights)
        return states, read


def lanes_of(
    lanes: Sequence[tuple[int, int, Sequence[int], Sequence[int]]], *, num_spare: int = 0
) -> DeltaLanes:
    """Returns lanes of: source, target, slots with those before, rows of the lane's own."""
    table, places = [], list[tuple[int, int]]()
    for source, target, slots, rows in lanes:
        table.append((source, target, len(places), len(rows)))
        before = [NOWHERE] * (len(slots) - len(rows))
        places += zip(slots, [*before, *rows], strict=True)
    # What a graph leaves of its tables names no state and no row.
    table += [(10**6, 10**6, 10**6, 10**6)] * num_spare
    # An empty list would be one of float32.
    return DeltaLanes(
        torch.tensor(table, dtype=torch.int64, device=CUDA).view(-1, 4),
        torch.tensor([len(lanes)], device=CUDA),
        torch.tensor(places, dtype=torch.int64, device=CUDA).view(-1, 2),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_lanes_are_advanced(shape: DeltaShape, dtype: torch.dtype) -> None:
    """Lanes of several lengths, more than run at once, some at a sequence's begin, one that is
    only copied, some whose state or tokens nobody wants."""
    layer, window = Layer.random(shape, dtype), shape.window - 1
    short = [
        (4, NOWHERE, [*range(20, 20 + window), 30 + number], [7 + number]) for number in range(8)
    ]
    lanes = lanes_of(
        [
            (4, 1, [*[NOWHERE] * window, 5, 9, 2, 33, 1], [0, 1, 2, 3, NOWHERE]),
            (3, 3, [*range(10, 10 + window), 12], [5]),
            (4, 0, [NOWHERE] * window, []),
            (2, NOWHERE, [*[NOWHERE] * (window - 1), *[8] * min(window, 1), 7, 6], [NOWHERE, 4]),
            *short,
        ],
        num_spare=3,
    )
    states, read = layer.advanced(lanes, 16)
    exact, exact_read = layer.plainly_advanced(lanes, 16)
    torch.testing.assert_close(states, exact, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(read, exact_read, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    assert torch.equal(states[0], layer.states[4])
    assert torch.equal(states[2], layer.states[2])
    assert not read[6].any()
    assert not read[15].any()


def test_no_lanes_change_nothing() -> None:
    layer = Layer.random(SHAPE, torch.float32)
    for lanes in (lanes_of([]), lanes_of([], num_spare=2)):
        states, read = layer.advanced(lanes, 3)
        assert torch.equal(states, layer.states)
        assert not read.any()


# For a published head Triton's interpreter takes ten seconds; lanes of one are advanced above.
_HEADS = (
    ["grouped, odd sizes"] if CUDA.type == "cpu" else ["grouped, odd sizes", "Qwen3-Next's head"]
)


@pytest.mark.parametrize("shape", [SHAPES[each] for each in _HEADS], ids=_HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_however_it_is_computed(
    shape: DeltaShape, dtype: torch.dtype
) -> None:
    """At once, one by one, in parts beside others, and as the path of a tree."""
    layer, window = Layer.random(shape, dtype), shape.window - 1
    count = 5 if CUDA.type == "cpu" else 33
    slots = [*[NOWHERE] * window, *range(1, 1 + count)]
    at_once = lanes_of([(4, 0, slots, range(count))])
    states, read = layer.advanced(at_once, count)

    one_by_one = torch.zeros_like(read)
    kept = layer.states
    for token in range(count):
        own = slots[token : token + window + 1]
        kept, found = layer.advanced(lanes_of([(4 if token == 0 else 0, 0, own, [0])]), 1, kept)
        one_by_one[token] = found[0]
    assert torch.equal(kept[0], states[0])
    assert torch.equal(one_by_one, read)

    # Others in front of them, more than run at once.
    others = [(3, NOWHERE, [*range(5, 5 + window), 2, 8], [NOWHERE, NOWHERE])] * 9
    half = count // 2
    first = lanes_of([*others, (4, 0, slots[: window + half], range(half))], num_spare=4)
    kept, found = layer.advanced(first, count)
    rest = (0, 0, slots[half:], range(half, count))
    kept, more = layer.advanced(lanes_of([*others[:2], rest, *others]), count, kept)
    assert torch.equal(kept[0], states[0])
    assert torch.equal(found[:half], read[:half])
    assert torch.equal(more[half:], read[half:])

    wanted = [NOWHERE] * (count - 1)
    path = lanes_of([*others, (4, NOWHERE, slots, [*wanted, 0])])
    assert torch.equal(layer.advanced(path, 1)[1][0], read[-1])


def prompts_of(lanes: DeltaLanes, sizes: Sequence[Sequence[int]]) -> DeltaPrompts:
    """Returns lanes as prompts whose chunks have these sizes."""
    table, chunks = lanes.table.tolist(), list[tuple[int, int]]()
    for lane, own in zip(table, sizes, strict=True):
        assert sum(own) == lane[3]
        firsts = [lane[2] + sum(own[:number]) for number in range(len(own))]
        lane[2:] = len(chunks), len(own)
        chunks += zip(firsts, own, strict=True)
    return DeltaPrompts(
        torch.tensor(table, device=CUDA), torch.tensor(chunks, device=CUDA), lanes.places
    )


@pytest.mark.parametrize("turn_chunks", [1, 3, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[each] for each in _HEADS], ids=_HEADS)
def test_prompts_are_advanced(
    shape: DeltaShape, dtype: torch.dtype, turn_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths, at a sequence's begin and behind one, all at once and in turns
    that end in the middle of them, are what their tokens are one after another."""
    monkeypatch.setattr("shared.kernels.delta_chunks_triton._TURN_CHUNKS", turn_chunks)
    history, sizes = shape.window - 1, [[CHUNK, CHUNK, 9], [5, 61], [CHUNK, 3]]
    counts = [sum(own) for own in sizes]
    begins = [sum(counts[:number]) for number in range(3)]
    layer = Layer.random(shape, dtype, history + sum(counts))
    slots, rows = range(history + sum(counts)), range(sum(counts))
    first, other, last = (
        rows[begin : begin + count] for begin, count in zip(begins, counts, strict=True)
    )
    lanes = lanes_of(
        [
            (4, 1, [*[NOWHERE] * history, *slots[history : history + counts[0]]], first),
            (3, 3, slots[begins[1] : begins[1] + history + counts[1]], other),
            # Whose state nobody wants, and some of whose tokens.
            (4, NOWHERE, slots[begins[2] :], [*[NOWHERE] * 60, *last[60:]]),
        ]
    )
    prompts = prompts_of(lanes, sizes)
    states, read = layer.prompts_advanced(prompts, sum(counts))
    for exact, exact_read in (
        layer.prompts_plainly_advanced(prompts, sum(counts)),
        layer.plainly_advanced(lanes, sum(counts)),
    ):
        torch.testing.assert_close(states, exact, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(read, exact_read, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    assert torch.equal(states[[0, 2, 4]], layer.states[[0, 2, 4]])
    assert not read[last[0] : last[0] + 60].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_inputs_are_stored(num_rows: int, dtype: torch.dtype) -> None:
    layer = Layer.random(SHAPE, dtype)
    projected = torch.randn(num_rows, SHAPE.num_channels + SHAPE.value_size, device=CUDA).to(dtype)
    arguments = (
        torch.randperm(NUM_SLOTS, device=CUDA)[:num_rows],
        torch.randint(2**62, (num_rows,), device=CUDA) * 2 + 1,
        projected[:, : SHAPE.num_channels],
        torch.randn(num_rows, 2 * SHAPE.num_value_heads, device=CUDA).to(dtype),
    )
    expected = layer.stored.clone()
    store_inputs.plain(expected, *arguments)
    store_inputs(layer.stored, *arguments)
    columns = STAMP_SIZE + SHAPE.num_inputs
    found, exact = (
        rows.permute(2, 0, 1, 3, 4).flatten(1)[:, :columns] for rows in (layer.stored, expected)
    )
    assert torch.equal(found, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "dim"), [(4, 16), (9, 20), (32, 128)])
def test_norm_is_gated(num_heads: int, dim: int, dtype: torch.dtype) -> None:
    size = num_heads * dim
    read = torch.randn(3, size, device=CUDA).to(dtype)
    gates = torch.randn(3, 2 * size, device=CUDA).to(dtype)[:, size:]
    weight = torch.randn(dim, device=CUDA).to(dtype)
    found, exact = (each(read, gates, weight, 1e-6) for each in (gated_norm, gated_norm.plain))
    torch.testing.assert_close(found, exact, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
