"""Which CUDA graphs there are, and which one a batch takes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shared.kv.batch import SequenceRows, build_batch
from shared.runtime.graphs import (
    GraphKey,
    GraphLimits,
    key_of,
    keys_of,
    largest_keys,
    prompt_row_buckets,
    row_buckets,
    sequence_buckets,
)
from tests.helpers.attention_batches import chunk, tree, with_pages

LIMITS = GraphLimits(max_rows=256, max_sequences=48, max_tail_width=80, max_context_tokens=512)
WITH_PROMPTS = replace(LIMITS, max_prompt_rows=400)
WITH_MANY = replace(LIMITS, max_sequences=200, max_prompt_rows=2048)


def _key(sequences: list[SequenceRows], limits: GraphLimits = LIMITS) -> GraphKey:
    placed, _ = with_pages(random.Random(0), sequences, 4)
    batch = build_batch(placed, page_size=4, device=torch.device("cpu"))
    key = key_of(batch, limits, (1,))
    assert key is not None
    return key


def test_buckets_end_at_the_limit() -> None:
    assert row_buckets(48)[-3:] == (32, 40, 48)
    assert row_buckets(3) == (1, 2, 3)
    assert row_buckets(1) == (1,)


def test_rows_of_trees_have_a_graph_for_few_sequences_and_one_for_many() -> None:
    assert sequence_buckets(32, 48, has_tail=True) == (8, 32)
    assert sequence_buckets(64, 48, has_tail=True) == (16, 48)
    assert sequence_buckets(256, 48, has_tail=True) == (48,)
    assert sequence_buckets(16, 48, has_tail=True) == (16,)
    assert sequence_buckets(64, 48, has_tail=False) == (48,)


@pytest.mark.parametrize(
    ("num_trees", "num_plain", "expected"),
    [(1, 0, (12, 12)), (3, 0, (32, 8)), (2, 7, (32, 32)), (1, 40, (64, 48)), (0, 40, (40, 40))],
)
def test_a_batch_takes_the_smallest_graph_that_holds_it(
    num_trees: int, num_plain: int, expected: tuple[int, int]
) -> None:
    rng = random.Random(1)
    trees = [tree(rng, start=9, num_nodes=10) for _ in range(num_trees)]
    key = _key([*trees, *[chunk(5, 1)] * num_plain])
    assert (key.num_rows, key.num_sequences) == expected
    assert key.has_tail == bool(num_trees)
    assert key in keys_of(LIMITS, (1,))


def test_keys_ascend_and_differ() -> None:
    keys = keys_of(LIMITS, ())
    assert len(set(keys)) == len(keys)
    assert [key.num_rows for key in keys] == sorted(key.num_rows for key in keys)
    assert keys[-1].num_rows == 256
    assert keys[-1].num_sequences == 48
    assert keys[-1].has_tail


def test_prompts_have_graphs_of_their_own_up_to_their_limit() -> None:
    assert prompt_row_buckets(LIMITS) == ()
    assert prompt_row_buckets(WITH_PROMPTS)[-2:] == (384, 400)
    prompts = [key for key in keys_of(WITH_PROMPTS, ()) if key.has_prompts]
    assert [key.num_rows for key in prompts] == list(prompt_row_buckets(WITH_PROMPTS))
    assert keys_of(LIMITS, ()) == [key for key in keys_of(WITH_PROMPTS, ()) if not key.has_prompts]


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        ([chunk(0, 25)], (32, 32)),
        ([chunk(0, 100), chunk(40, 1)], (128, 48)),
        ([chunk(0, 390)], (400, 48)),
    ],
)
def test_a_forward_with_a_prompt_takes_a_graph_of_prompts(
    sequences: list[SequenceRows], expected: tuple[int, int]
) -> None:
    key = _key(sequences, WITH_PROMPTS)
    assert (key.num_rows, key.num_sequences, key.has_prompts) == (*expected, True)
    assert key in keys_of(WITH_PROMPTS, (1,))


def test_a_prompt_beside_many_decoding_sequences_has_a_graph() -> None:
    decoding = [chunk(5, 1)] * 120
    key = _key([chunk(0, 400), *decoding], WITH_MANY)
    assert (key.num_rows, key.num_sequences, key.has_prompts) == (576, 200, True)
    assert key in keys_of(WITH_MANY, (1,))
    assert _key([chunk(0, 400), *decoding[:60]], WITH_MANY).num_sequences == 64
    placed, _ = with_pages(random.Random(0), [chunk(0, 1200), *decoding], 4)
    batch = build_batch(placed, page_size=4, device=torch.device("cpu"))
    assert key_of(batch, WITH_MANY, (1,)) is None


def test_trees_and_few_rows_take_the_graphs_that_they_take_without_prompts() -> None:
    rng = random.Random(1)
    for sequences in ([chunk(0, 16)], [tree(rng, start=9, num_nodes=10), chunk(0, 30)]):
        assert _key(sequences, WITH_PROMPTS) == _key(sequences)


def test_the_largest_graphs_leave_room_for_all_others() -> None:
    limits = GraphLimits(512, 256, 144, 8192, 2048)
    keys = keys_of(limits, ())
    largest = largest_keys(keys)
    sizes = [(key.num_rows, key.num_sequences) for key in largest]
    assert sizes == [(1280, 256), (512, 256), (256, 256), (2048, 64)]

    def has_room(key: GraphKey, first: list[GraphKey]) -> bool:
        kind = (key.has_tail, key.has_prompts)
        return any(
            (other.has_tail, other.has_prompts) == kind
            and other.num_rows >= key.num_rows
            and other.num_sequences >= key.num_sequences
            for other in first
        )

    assert all(has_room(key, largest) for key in keys)
    # The one with the most rows alone does not: it has fewer sequences.
    assert not all(has_room(key, [keys[-1]]) for key in keys if key.has_prompts)
