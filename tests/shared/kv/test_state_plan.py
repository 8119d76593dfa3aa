"""A plan in memory that does not move is the plan as it is, whatever the one before has left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shared.kernels.delta_rule import CHUNK
from shared.kv.batch import SequenceRows, empty_decode_batch
from shared.kv.pool import KvPool
from shared.kv.state_plan import StateSlots
from shared.models.decoder import Decoder
from shared.runtime.graphs import GraphInputs, GraphLimits
from shared.runtime.runner import ModelRunner
from tests.helpers.engines import recurrent_decoder
from tests.helpers.state_steps import NUM_PAGES, PAGE_SIZE, batch_of, causal, state_steps

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return recurrent_decoder(tmp_path_factory.mktemp("recurrent"))


def new_pool(decoder: Decoder, num_states: int = 4) -> KvPool:
    return KvPool(decoder.kv_layout(PAGE_SIZE), NUM_PAGES, CPU, num_states=num_states)


@pytest.mark.parametrize("num_states", [4, 1])
@torch.inference_mode()
def test_steps_read_a_plan_in_fixed_memory(decoder: Decoder, num_states: int) -> None:
    plain, pool = new_pool(decoder, num_states), new_pool(decoder, num_states)
    runner, slots = ModelRunner(decoder, plain), StateSlots(64, 8, 500, CPU)
    for sequences in state_steps():
        batch = batch_of(sequences, CPU)
        with pool.advancing(batch) as plan:
            assert plan is not None
            assert slots.fits(plan)
            slots.fill(plan)
            sizes = len(batch.token_ids), len(sequences)
            states = slots.inputs.first(*sizes, has_tail=batch.tail_mask is not None)
            hidden = decoder.forward(batch, pool, states=states).hidden
        assert torch.equal(hidden, runner.run(batch).hidden)


@torch.inference_mode()
def test_what_is_computed_for_nobody_leaves_states(decoder: Decoder) -> None:
    """A graph is captured between two steps, whatever the first of them has planned."""
    pool, slots = new_pool(decoder), StateSlots(64, 8, 500, CPU)
    assert pool.states is not None
    nobody = empty_decode_batch(64, PAGE_SIZE, CPU)
    for sequences in state_steps():
        batch = batch_of(sequences, CPU)
        with pool.advancing(batch) as plan:
            assert plan is not None
            slots.fill(plan)
            sizes = len(batch.token_ids), len(sequences)
            states = slots.inputs.first(*sizes, has_tail=batch.tail_mask is not None)
            decoder.forward(batch, pool, states=states)
        own, kept = pool.states.values.clone(), pool.storage[:, :, PAGE_SIZE:].clone()
        slots.clear()
        decoder.forward(nobody, pool, states=slots.inputs.first(64, 8, has_tail=True))
        assert torch.equal(pool.states.values, own)
        assert torch.equal(pool.storage[:, :, PAGE_SIZE:], kept)


@torch.inference_mode()
def test_paths_share_the_rows_of_their_nodes(decoder: Decoder) -> None:
    pool, num_candidates = new_pool(decoder), list[int]()
    for sequences in state_steps():
        batch = batch_of(sequences, CPU)
        with pool.advancing(batch) as plan:
            assert plan is not None
            decoder.forward(batch, pool, states=plan.upload(CPU))
        wanted = sorted(row for row in plan.places[:, 1].tolist() if row >= 0)
        assert wanted == list(range(len(batch.token_ids)))
        num_candidates.append(len(plan.candidates))
    # A chain and a tree of three leaves; trees of two and of one, and a chain.
    assert num_candidates == [0, 0, 0, 1 + 3, 0, 2 + 1 + 1, 0]


@torch.inference_mode()
def test_a_plan_of_too_many_tokens_does_not_fit(decoder: Decoder) -> None:
    limits = GraphLimits(max_rows=4, max_sequences=1, max_tail_width=2, max_context_tokens=64)
    inputs = GraphInputs(limits, decoder.kv_layout(PAGE_SIZE), CPU)
    pool = new_pool(decoder)
    fits = []
    for start, count in ((0, 40), (40, 1), (30, 1)):
        batch = batch_of([causal(0, start, count)], CPU)
        with pool.advancing(batch) as plan:
            assert plan is not None
            fits.append(inputs.fits(plan))
            decoder.forward(batch, pool, states=plan.upload(CPU))
    assert fits == [False, True, False]


@torch.inference_mode()
def test_prompts_are_cut_at_multiples(decoder: Decoder) -> None:
    """From the first token and from a checkpoint, beside short ones; none is for a graph."""
    pool, slots = new_pool(decoder), StateSlots(64, 8, 500, CPU)
    long, other, short = range(1, 14), range(14, 24), range(24, 34)
    for sequences, sizes in (
        ([rows(long, 0, 70), rows(short, 0, 9)], [[64, 6]]),
        ([rows(short, 9, 1), rows(other, 0, 66)], [[64, 2]]),
        # As many as a chain may be, all of which stay.
        ([rows(short, 10, 64)], []),
        ([rows(long, 70, 125), rows(short, 74, 1), rows(other, 66, 67)], [[58, 64, 3], [62, 5]]),
    ):
        batch = batch_of(sequences, CPU)
        with pool.advancing(batch) as plan:
            assert plan is not None
            decoder.forward(batch, pool, states=plan.upload(CPU))
        assert plan.chunks[:, 1].tolist() == [size for own in sizes for size in own]
        assert plan.prompts[:, 3].tolist() == [len(own) for own in sizes]
        assert plan.prompts[:, 2].tolist() == [sum(map(len, sizes[:n])) for n in range(len(sizes))]
        assert slots.fits(plan) == (not sizes)
        wanted = sorted(row for row in plan.places[:, 1].tolist() if row >= 0)
        assert wanted == list(range(len(batch.token_ids)))
        # The chunks' own places are the slots of the long ones, in order.
        own = [plan.places[first + 3 :][:size, 0] for first, size in plan.chunks.tolist()]
        parts = batch.slots.split(batch.query_starts.diff().tolist())
        expected = [slot for part in parts if len(part) > CHUNK for slot in part.tolist()]
        assert [slot for part in own for slot in part] == expected


def rows(pages: Sequence[int], start: int, count: int) -> SequenceRows:
    tokens = [number % 13 for number in range(start, start + count)]
    return SequenceRows.causal(tokens, start, pages, range(count))
