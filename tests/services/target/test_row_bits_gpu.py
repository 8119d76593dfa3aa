"""In bfloat16 on a GPU a row has the same bits alone, in any batch and as a tree's root."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.kernels.linear import is_hopper
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.runtime.graphs import GraphLimits
from shared.runtime.runner import ModelRunner
from shared.tokens import SamplingParams, StopParams
from tests.helpers.attention_batches import chunk, tree, with_pages
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.engines import (
    VOCAB_SIZE,
    Proposal,
    ScriptedDraft,
    build_engine,
    oracle_trees,
    random_trees,
    request,
    run,
    shuffled_drops,
)

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and not is_hopper(CUDA), reason="products need Hopper"
    ),
]
PAGE_SIZE, NUM_PAGES = 16, 800
# Depths that 128 divides, as products whose rows keep their bits need them.
SHAPE = TinyShape(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=384,
    max_position_embeddings=512,
)
GRAPHS = GraphLimits(max_rows=320, max_sequences=32, max_tail_width=24, max_context_tokens=200)
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "seeded": SamplingParams(seed=7)}
MOST = 32
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), shape=SHAPE, seed=3)
    return load_decoder(folder, dtype=torch.bfloat16, device=CUDA)


def _runner(decoder: Decoder) -> ModelRunner:
    pool = KvPool(decoder.kv_layout(PAGE_SIZE), NUM_PAGES, CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    for cache in (*pool.keys, *pool.values):
        cache.normal_(generator=generator)
    return ModelRunner(decoder, pool)


def _first_logits(runner: ModelRunner, sequences: Sequence[SequenceRows]) -> Tensor:
    """Returns the logits of the first row; the first sequence's pages are the same in every call,
    and so is its first token."""
    rng = random.Random(1)
    placed, _ = with_pages(rng, list(sequences[1:]), PAGE_SIZE)
    others = [replace(rows, pages=[page + 40 for page in rows.pages]) for rows in placed]
    first = replace(sequences[0], pages=range(1, 40))
    filled = [
        replace(
            rows,
            token_ids=[1, *(rng.randrange(VOCAB_SIZE) for _ in rows.token_ids[1:])],
            logit_rows=range(len(rows.token_ids)),
        )
        for rows in (first, *others)
    ]
    batch = build_batch(filled, page_size=PAGE_SIZE, device=CUDA)
    return runner.run(batch).logits[0].clone()


def test_logits_of_a_row_have_the_same_bits_in_any_batch(decoder: Decoder) -> None:
    runner = _runner(decoder)
    alone = _first_logits(runner, [chunk(300, 1)])
    for count in range(2, MOST + 1):
        found = _first_logits(runner, [chunk(300, 1), *[chunk(90 + count, 1)] * (count - 1)])
        assert torch.equal(found, alone), f"batch of {count}"


@pytest.mark.parametrize("num_others", [0, 1, 8, 31])
def test_the_root_of_a_tree_has_the_bits_of_a_plain_token(
    decoder: Decoder, num_others: int
) -> None:
    """32 trees of 32 have 1,024 rows."""
    runner, rng = _runner(decoder), random.Random(2)
    alone = _first_logits(runner, [chunk(300, 1)])
    for num_nodes in (1, 2, 16, 32):
        trees = [tree(rng, start=300 - i, num_nodes=num_nodes) for i in range(num_others + 1)]
        found = _first_logits(runner, trees)
        assert torch.equal(found, alone), f"{num_nodes} nodes"


def _outputs(
    decoder: Decoder, sampling: SamplingParams, count: int, propose: Proposal | None = None
) -> list[list[int]]:
    """Returns what sequences of short prompts are answered, `count` at a time. No chunk has more
    than 16 rows, above which prompts are computed by a kernel with other bits."""
    prompts = [[1 + key % 20, 2, key % 7 + 3] for key in range(MOST)]
    outputs: list[list[int]] = []
    for first in range(0, MOST, count):
        engine = build_engine(decoder, num_pages=1000, max_running=count, graph_limits=GRAPHS)
        if propose is not None:
            ScriptedDraft(engine, propose, disturb=shuffled_drops(first)).attach()
        keys = range(first, first + count)
        stop = StopParams(NUM_TOKENS)
        collector = run(
            engine,
            [request(prompts[key], replace(sampling, seed=key), stop) for key in keys],
        )
        outputs += [collector.token_ids(key) for key in range(count)]
    return outputs


@pytest.mark.parametrize("name", SAMPLINGS)
def test_output_is_the_same_in_any_batch_with_any_draft(decoder: Decoder, name: str) -> None:
    sampling = SAMPLINGS[name]
    expected = _outputs(decoder, sampling, 1)
    for count in (2, 8, MOST):
        assert _outputs(decoder, sampling, count) == expected, f"plain, {count} at a time"
        assert _outputs(decoder, sampling, count, random_trees(count)) == expected, f"{count}"
    wholes = [[1 + key % 20, 2, key % 7 + 3, *output] for key, output in enumerate(expected)]
    for count in (4, MOST):
        script = oracle_trees(wholes, count, quality=0.8)
        assert _outputs(decoder, sampling, count, script) == expected, f"{count} at a time"
