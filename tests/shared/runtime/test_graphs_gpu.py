"""Graphs compute what the same forward computes without one, whatever shares their padding."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch, SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.runtime.graphs import ForwardGraphs, GraphLimits
from shared.runtime.runner import ModelRunner, RunnerOutput
from tests.helpers.attention_batches import chunk, tree, with_pages
from tests.helpers.checkpoints import TinyShape, write_checkpoint

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PAGE_SIZE, NUM_PAGES = 16, 120
LIMITS = GraphLimits(max_rows=48, max_sequences=8, max_tail_width=40, max_context_tokens=512)
SHAPE = TinyShape(hidden_size=128, head_dim=32, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("model"), "llama", SHAPE)
    return load_decoder(folder, dtype=torch.bfloat16, device=CUDA)


def random_pool(decoder: Decoder) -> KvPool:
    """Returns a pool whose pages hold noise, and NaN in the padding page."""
    pool = KvPool(decoder.kv_layout(PAGE_SIZE), NUM_PAGES, CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    for cache in (*pool.keys, *pool.values):
        cache.normal_(generator=generator)
        cache[:PAGE_SIZE] = torch.nan
    return pool


def batch_of(sequences: list[SequenceRows], seed: int) -> ForwardBatch:
    rng = random.Random(seed)
    placed, _ = with_pages(rng, sequences, PAGE_SIZE)
    filled = [
        replace(
            rows,
            token_ids=[rng.randrange(256) for _ in rows.token_ids],
            logit_rows=range(len(rows.token_ids)),
        )
        for rows in placed
    ]
    return build_batch(filled, page_size=PAGE_SIZE, device=CUDA)


PROMPT_LIMITS = replace(LIMITS, max_prompt_rows=200, max_sequences=80)


def prompt_batches() -> list[ForwardBatch]:
    makers = [
        [chunk(0, 25)],
        [chunk(0, 150)],
        # Between them sequences of few rows, which leave fixed memory to the next prompt.
        [chunk(9, 1), chunk(200, 1)],
        [chunk(0, 60), chunk(33, 40), chunk(100, 1), chunk(7, 16)],
        [chunk(300, 200)],
        [chunk(0, 28), chunk(0, 29), chunk(0, 30), *(chunk(40 + i, 1) for i in range(5))],
        [chunk(0, 100), *(chunk(i % 15, 1) for i in range(70))],
    ]
    return [batch_of(sequences, seed) for seed, sequences in enumerate(makers)]


def batches() -> list[ForwardBatch]:
    rng = random.Random(5)
    makers = [
        [chunk(9, 1)],
        [chunk(100 + 7 * i, 1) for i in range(7)],
        [tree(rng, start=63, num_nodes=33)],
        [tree(rng, start=20, num_nodes=9), chunk(200, 1), tree(rng, start=300, num_nodes=20)],
        [chunk(30, 1), chunk(31, 2), chunk(77, 16)],
        [chunk(400, 1)],
        [tree(rng, start=16, num_nodes=2), chunk(5, 20)],
        # Trees in a graph for many sequences.
        [*(tree(rng, start=11 * i, num_nodes=3) for i in range(7)), chunk(50, 3)],
    ]
    return [batch_of(sequences, seed) for seed, sequences in enumerate(makers)]


@pytest.fixture(scope="module")
def graph_runner(decoder: Decoder) -> ModelRunner:
    pool = random_pool(decoder)
    graphs = ForwardGraphs(decoder, pool, LIMITS)
    graphs.capture()
    return ModelRunner(decoder, pool, graphs)


def test_graphs_compute_what_the_forward_computes(
    decoder: Decoder, graph_runner: ModelRunner
) -> None:
    """In turns, so that what one batch leaves in fixed memory meets the next one."""
    check_same(decoder, graph_runner, [*batches(), *batches()])


def test_graphs_of_prompts_compute_what_the_forward_computes(decoder: Decoder) -> None:
    pool = random_pool(decoder)
    graphs = ForwardGraphs(decoder, pool, PROMPT_LIMITS)
    graphs.capture((1,))
    assert all(graphs.fits(batch, (1,)) for batch in prompt_batches())
    check_same(decoder, ModelRunner(decoder, pool, graphs), [*prompt_batches(), *prompt_batches()])


def check_same(decoder: Decoder, graph_runner: ModelRunner, found_in: list[ForwardBatch]) -> None:
    """Also that results of some logit rows alone are those of the rows that were asked for."""
    for whole in found_in:
        for batch in (whole, replace(whole, logit_rows=whole.logit_rows[-1:])):
            plain = ModelRunner(decoder, random_pool(decoder))
            reset(graph_runner.pool, plain.pool)
            expected = plain.run(batch, capture_layers=(1,))
            found = graph_runner.run(batch, capture_layers=(1,))
            assert not torch.isnan(found.logits).any()
            assert_equal(found, expected)
            for cache, same in zip(graph_runner.pool.keys, plain.pool.keys, strict=True):
                close(cache[PAGE_SIZE:], same[PAGE_SIZE:])


def reset(pool: KvPool, source: KvPool) -> None:
    for cache, same in zip((*pool.keys, *pool.values), (*source.keys, *source.values), strict=True):
        cache.copy_(same)


def assert_equal(found: RunnerOutput, expected: RunnerOutput) -> None:
    close(found.logits, expected.logits)
    close(found.hidden, expected.hidden)
    for feature, other in zip(found.features, expected.features, strict=True):
        close(feature, other)


def close(found: Tensor, expected: Tensor) -> None:
    """Products may take another kernel for padded rows, so bits may differ in bfloat16."""
    assert found.shape == expected.shape
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 2e-2


def test_padding_rows_write_the_padding_page_alone(
    decoder: Decoder, graph_runner: ModelRunner
) -> None:
    batch = batches()[3]
    before = random_pool(decoder)
    reset(graph_runner.pool, before)
    graph_runner.run(batch)
    own = torch.cat((batch.slots, torch.arange(PAGE_SIZE, device=CUDA)))
    for cache, same in zip(graph_runner.pool.keys, before.keys, strict=True):
        untouched = torch.ones(len(cache), dtype=torch.bool, device=CUDA).index_fill_(0, own, False)
        assert torch.equal(cache[untouched], same[untouched])
        assert not torch.equal(cache[batch.slots], same[batch.slots])


def test_forwards_outside_the_buckets_run_without_a_graph(
    decoder: Decoder, graph_runner: ModelRunner
) -> None:
    outside = [
        [chunk(0, 60)],
        [chunk(3, 25)],
        [chunk(600, 1)],
        [chunk(i, 1) for i in range(9)],
        [tree(random.Random(0), start=4, num_nodes=45)],
    ]
    graphs = ForwardGraphs(decoder, graph_runner.pool, LIMITS)
    for seed, sequences in enumerate(outside):
        batch = batch_of(sequences, seed)
        assert not graphs.fits(batch, ())
        plain = ModelRunner(decoder, random_pool(decoder))
        reset(graph_runner.pool, plain.pool)
        assert_equal(graph_runner.run(batch), plain.run(batch))


def test_graphs_of_more_rows_are_captured_one_by_one_later(decoder: Decoder) -> None:
    graphs = ForwardGraphs(decoder, random_pool(decoder), LIMITS)
    graphs.begin()
    # Of up to 8 rows with and without trees, and the largest with trees.
    assert len(graphs._graphs) == 2 * 4 + 1
    num_later = 0
    while graphs.capture_next():
        num_later += 1
    whole = ForwardGraphs(decoder, random_pool(decoder), LIMITS)
    whole.capture()
    assert set(graphs._graphs) == set(whole._graphs)
    assert num_later == len(whole._graphs) - 9
