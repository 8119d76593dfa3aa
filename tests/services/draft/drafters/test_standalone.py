"""The standalone drafter against a naive oracle that recomputes every path from scratch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from services.draft.drafters.contexts import CONTEXT_MARGIN
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_model import DecoderModel
from shared.speculation.distributions import gumbel_noise
from shared.tokens import SamplingParams, TokenTree, TreeShape
from tests.helpers.checkpoints import TinyShape, build_model, write_checkpoint
from tests.helpers.drafting import (
    GREEDY,
    SAMPLED,
    VOCAB_SIZE,
    committed,
    draft_sequence,
    plain_grower,
    propose,
    random_text,
)

PAGE_SIZE = 4
SHAPE = TinyShape(vocab_size=VOCAB_SIZE, max_position_embeddings=128)
SHAPES = [
    TreeShape(1, 1, 2),
    TreeShape(4, 1, 5),
    TreeShape(6, 1, 3),
    TreeShape(1, 5, 4),
    TreeShape(2, 3, 8),
    TreeShape(4, 4, 16),
    TreeShape(3, 2, 30),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_checkpoint(tmp_path_factory.mktemp("draft"), shape=SHAPE)
    return load_decoder(folder, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def oracle_model() -> torch.nn.Module:
    return build_model("llama", SHAPE)


def _drafter(decoder: Decoder, *, num_pages: int = 200, context: int = 128) -> StandaloneDrafter:
    pool = KvPool(decoder.kv_layout(PAGE_SIZE), num_pages, CPU)
    leases = KvLeases(num_pages, PAGE_SIZE)
    grower = plain_grower(DecoderModel(decoder, pool), context)
    runner = ModelRunner(decoder, pool)
    return StandaloneDrafter(runner, leases, grower, max_context_tokens=context)


def _open(drafter: StandaloneDrafter, sequence: DraftSequence, shape: TreeShape) -> None:
    drafter.open(sequence)
    assert drafter.reserve(sequence, shape)


def _commit(
    drafter: StandaloneDrafter, sequence: DraftSequence, tokens: Sequence[int], *nodes: int
) -> None:
    verdict = committed(sequence, tokens, *nodes)
    drafter.commit(sequence, verdict, None)


Path_ = tuple[int, ...]


@torch.no_grad()
def _oracle(
    model: torch.nn.Module, sequence: DraftSequence, shape: TreeShape, *, window: int = 0
) -> dict[Path_, float]:
    """Returns the kept paths with their values, each level's logits computed from scratch."""

    def next_log_probs(path: Path_) -> list[float]:
        tokens = torch.tensor([[*sequence.token_ids[window:], *path]])
        logits = model(tokens).logits[0, -1:].float()
        if not sequence.sampling.is_greedy:
            position = torch.tensor([sequence.num_tokens + len(path)])
            seed = torch.tensor([sequence.sampling.seed])
            logits = logits + gumbel_noise(seed, position, VOCAB_SIZE)
        return list(logits.log_softmax(dim=1)[0].tolist())

    values: dict[Path_, float] = {}
    frontier: list[Path_] = [()]
    for _ in range(min(shape.num_steps, shape.max_node_count)):
        children: dict[Path_, float] = {}
        for path in frontier:
            log_probs = next_log_probs(path)
            best = sorted(range(VOCAB_SIZE), key=lambda token: -log_probs[token])[: shape.topk]
            base = values.get(path, 0.0)
            children.update({(*path, token): base + log_probs[token] for token in best})
        values.update(children)
        frontier = sorted(children, key=lambda path: -children[path])[: shape.topk]
    kept = sorted(values, key=lambda path: -values[path])[: shape.max_node_count]
    return {path: values[path] for path in kept}


def _values(tree: TokenTree) -> dict[Path_, float]:
    """Returns each node's path with the sum of log probabilities along it."""
    return {
        tuple(tree.token_ids[n] for n in tree.path(node)): sum(
            tree.log_probs[n] for n in tree.path(node)
        )
        for node in range(len(tree))
    }


def _assert_same(actual: TokenTree, expected: dict[Path_, float]) -> None:
    assert _values(actual) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tree_equals_the_naive_oracle(
    decoder: Decoder, oracle_model: torch.nn.Module, shape: TreeShape, sampling: SamplingParams
) -> None:
    sequence = draft_sequence(random_text(0, 21), sampling)
    drafter = _drafter(decoder)
    drafter.open(sequence)
    (tree,) = propose(drafter, shape, sequence)
    _assert_same(tree, _oracle(oracle_model, sequence, shape))


def test_noise_depends_on_the_seed(decoder: Decoder) -> None:
    shape = TreeShape(4, 1, 5)
    drafter = _drafter(decoder)
    trees = []
    for number, seed in enumerate((1, 1, 2)):
        sequence = draft_sequence(
            random_text(0, 21), SamplingParams(temperature=1.0, seed=seed), number
        )
        drafter.open(sequence)
        trees += propose(drafter, shape, sequence)
    assert trees[0].token_ids == trees[1].token_ids
    assert trees[0].token_ids != trees[2].token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [TreeShape(4, 1, 5), TreeShape(4, 4, 16)], ids=str)
def test_kept_kv_equals_a_fresh_computation_after_any_verdict(
    decoder: Decoder, oracle_model: torch.nn.Module, shape: TreeShape, sampling: SamplingParams
) -> None:
    generator = random.Random(7)
    sequence = draft_sequence(random_text(1, 13), sampling)
    drafter = _drafter(decoder)
    drafter.open(sequence)
    for _ in range(8):
        (tree,) = propose(drafter, shape, sequence)
        _assert_same(tree, _oracle(oracle_model, sequence, shape))
        node = generator.randrange(len(tree))
        path = tree.path(node)[: generator.randrange(len(tree.path(node)) + 1)]
        tokens = [*(tree.token_ids[n] for n in path), generator.randrange(VOCAB_SIZE)]
        _commit(drafter, sequence, tokens, *path)
        drafter.check()


def test_accepted_rows_are_not_computed_again(decoder: Decoder) -> None:
    shape = TreeShape(4, 4, 16)
    sequence = draft_sequence(random_text(2, 13))
    drafter = _drafter(decoder)
    drafter.open(sequence)
    (tree,) = propose(drafter, shape, sequence)
    deepest = max(range(len(tree)), key=lambda node: tree.depths[node])
    path = tree.path(deepest)
    _commit(drafter, sequence, [*(tree.token_ids[node] for node in path), 5], *path)
    # Rows of the last level are never computed: they have no children.
    num_kept = min(len(path), shape.num_steps - 1)
    assert drafter.backlog(sequence) == len(path) + 1 - num_kept


def test_a_verdict_on_another_sources_tree_is_followed_by_its_tokens(
    decoder: Decoder, oracle_model: torch.nn.Module
) -> None:
    shape = TreeShape(3, 2, 8)
    sequence = draft_sequence(random_text(3, 10))
    drafter = _drafter(decoder)
    drafter.open(sequence)
    propose(drafter, shape, sequence)
    # Node indices of a tree this drafter never saw.
    _commit(drafter, sequence, [1, 2, 3, 4, 5, 6, 7], 0, 3, 9, 11, 12, 14)
    _commit(drafter, sequence, [8])
    (tree,) = propose(drafter, shape, sequence)
    _assert_same(tree, _oracle(oracle_model, sequence, shape))


def test_attaching_in_the_middle_equals_having_been_there(decoder: Decoder) -> None:
    shape = TreeShape(3, 3, 9)
    here = draft_sequence(random_text(4, 11), number=1)
    drafter = _drafter(decoder)
    drafter.open(here)
    for tokens in ([1, 2], [3], [4, 5, 6]):
        propose(drafter, shape, here)
        _commit(drafter, here, tokens)
    late = draft_sequence(here.token_ids, number=2)
    other = _drafter(decoder)
    other.open(late)
    (expected,), (actual,) = propose(drafter, shape, here), propose(other, shape, late)
    _assert_same(actual, _values(expected))


@pytest.mark.parametrize("shape", [TreeShape(3, 1, 4), TreeShape(3, 3, 10)], ids=str)
def test_a_batch_proposes_what_each_sequence_alone_would(
    decoder: Decoder, shape: TreeShape
) -> None:
    texts = [random_text(seed, length) for seed, length in ((5, 3), (6, 17), (7, 1), (8, 30))]
    samplings = [GREEDY, SAMPLED, SAMPLED, GREEDY]
    batch = [draft_sequence(t, s, n) for n, (t, s) in enumerate(zip(texts, samplings, strict=True))]
    drafter = _drafter(decoder)
    for sequence in batch:
        drafter.open(sequence)
    together = propose(drafter, shape, *batch)
    for text, sampling, tree in zip(texts, samplings, together, strict=True):
        alone = draft_sequence(text, sampling)
        other = _drafter(decoder)
        other.open(alone)
        _assert_same(propose(other, shape, alone)[0], _values(tree))


def test_catching_up_in_chunks_changes_nothing(
    decoder: Decoder, oracle_model: torch.nn.Module
) -> None:
    shape = TreeShape(2, 2, 6)
    sequences = [
        draft_sequence(random_text(9, 40), number=1),
        draft_sequence(random_text(10, 23), number=2),
    ]
    drafter = _drafter(decoder)
    for sequence in sequences:
        drafter.open(sequence)
        assert drafter.reserve(sequence, shape)
    chunks = []
    while sum(drafter.backlog(sequence) for sequence in sequences) > 2:
        chunks.append(drafter.catch_up(sequences, 16))
    assert chunks == [16, 16, 16, 13]
    assert drafter.catch_up(sequences, 16) == 0
    for tree, sequence in zip(propose(drafter, shape, *sequences), sequences, strict=True):
        _assert_same(tree, _oracle(oracle_model, sequence, shape))


def test_a_second_sequence_with_the_same_prompt_reuses_its_pages(decoder: Decoder) -> None:
    shape = TreeShape(2, 1, 3)
    drafter = _drafter(decoder)
    first, second = (draft_sequence(random_text(11, 21), number=number) for number in (1, 2))
    drafter.open(first)
    (expected,) = propose(drafter, shape, first)
    drafter.open(second)
    assert drafter.backlog(second) == 1, "20 of 21 tokens are whole pages"
    assert propose(drafter, shape, second) == [expected]
    drafter.check()


def test_a_sequence_that_outgrows_the_context_slides_its_window(
    decoder: Decoder, oracle_model: torch.nn.Module
) -> None:
    shape, limit = TreeShape(3, 2, 6), 64
    drafter = _drafter(decoder, context=limit)
    sequence = draft_sequence(random_text(12, limit - CONTEXT_MARGIN))
    drafter.open(sequence)
    propose(drafter, shape, sequence)
    _commit(drafter, sequence, [7])
    window = sequence.num_tokens - (limit - CONTEXT_MARGIN) // 2
    assert drafter.backlog(sequence) == sequence.num_tokens - window
    (tree,) = propose(drafter, shape, sequence)
    _assert_same(tree, _oracle(oracle_model, sequence, shape, window=window))
    drafter.check()


def test_a_prompt_longer_than_the_context_starts_with_a_window(decoder: Decoder) -> None:
    drafter = _drafter(decoder, context=64)
    sequence = draft_sequence(random_text(13, 300))
    drafter.open(sequence)
    assert drafter.backlog(sequence) <= 64 - CONTEXT_MARGIN
    assert len(propose(drafter, TreeShape(3, 1, 4), sequence)[0]) == 3


def test_reserving_fails_without_change_when_pages_are_short(decoder: Decoder) -> None:
    drafter = _drafter(decoder, num_pages=6)
    shape = TreeShape(3, 1, 4)
    fits, too_long = (
        draft_sequence(random_text(14, 10), number=1),
        draft_sequence(random_text(15, 12), number=2),
    )
    drafter.open(fits)
    drafter.open(too_long)
    assert drafter.reserve(fits, shape)
    assert not drafter.reserve(too_long, shape)
    drafter.check()
    drafter.close(fits)
    assert drafter.reserve(too_long, shape)


def test_every_page_has_one_owner_through_churn(decoder: Decoder) -> None:
    generator = random.Random(16)
    drafter = _drafter(decoder, num_pages=60)
    shape = TreeShape(2, 2, 5)
    live: dict[int, DraftSequence] = {}
    for number in range(40):
        sequence = draft_sequence(
            random_text(number % 5, generator.randrange(1, 40)), number=number
        )
        drafter.open(sequence)
        if not drafter.reserve(sequence, shape):
            drafter.close(sequence)
            drafter.close(live.pop(min(live)))
            continue
        live[number] = sequence
        batch = [s for s in live.values() if drafter.reserve(s, shape)]
        drafter.propose(batch, shape)
        for held in batch:
            _commit(drafter, held, random_text(number, generator.randrange(1, 4)))
        drafter.check()
    for sequence in live.values():
        drafter.close(sequence)
    drafter.flush_prefix_cache()
    drafter.check()
    gauges = drafter.gauges()
    assert gauges["free_page_count"] == gauges["page_count"]
