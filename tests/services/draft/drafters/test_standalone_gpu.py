"""A draft whose forwards are CUDA graphs proposes and prepares what one without them does."""

from __future__ import annotations

import pytest
import torch

from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.runtime.graphs import ForwardGraphs, GraphLimits
from shared.runtime.runner import ModelRunner
from shared.tokens import Outcome, SamplingParams, TreeShape, Verdict
from tests.helpers.checkpoints import TinyShape, write_checkpoint

pytestmark = pytest.mark.gpu
VOCAB_SIZE, PAGE_SIZE, NUM_PAGES, CONTEXT = 64, 4, 300, 200
LIMITS = GraphLimits(
    max_rows=64, max_sequences=4, max_tail_width=128, max_context_tokens=CONTEXT + 128
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("draft")
    write_checkpoint(folder, shape=TinyShape(vocab_size=VOCAB_SIZE, max_position_embeddings=256))
    return load_decoder(folder, dtype=torch.float32, device=torch.device("cuda"))


def _drafter(decoder: Decoder, *, has_graphs: bool) -> StandaloneDrafter:
    pool = KvPool(decoder.kv_layout(PAGE_SIZE), NUM_PAGES, decoder.device)
    graphs = ForwardGraphs(decoder, pool, LIMITS) if has_graphs else None
    leases = KvLeases(NUM_PAGES, PAGE_SIZE)
    runner = ModelRunner(decoder, pool, graphs)
    return StandaloneDrafter(runner, leases, max_context_tokens=CONTEXT)


def _rounds(drafter: StandaloneDrafter, shape: TreeShape) -> list[tuple[int, ...]]:
    """Returns the tokens of every tree of a few rounds that accept a path each."""
    sequence = DraftSequence(
        SequenceKey(1, 1), list(range(1, 20)), 19, SamplingParams(seed=3), 0, True, VOCAB_SIZE, 256
    )
    drafter.open(sequence)
    found = []
    for number in range(7):
        assert drafter.reserve(sequence, shape)
        [proposal] = drafter.propose([sequence], shape)
        tree = proposal.tree
        found.append(tree.token_ids)
        path = tree.path(len(tree) - 1)[: number % 4]
        tokens = (*(tree.token_ids[node] for node in path), 7)
        sequence.token_ids.extend(tokens)
        verdict = Verdict(1, 0, Outcome.VERIFIED, (), tokens, sequence.num_tokens)
        drafter.commit(sequence, verdict, None)
    drafter.close(sequence)
    drafter.check()
    return found


@pytest.mark.parametrize("shape", [TreeShape(3, 1, 4), TreeShape(3, 3, 9)], ids=["chain", "tree"])
def test_graphs_change_no_tree(decoder: Decoder, shape: TreeShape) -> None:
    with_graphs = _rounds(_drafter(decoder, has_graphs=True), shape)
    without = _rounds(_drafter(decoder, has_graphs=False), shape)
    assert with_graphs == without
