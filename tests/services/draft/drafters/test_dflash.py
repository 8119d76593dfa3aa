"""The block drafter against an oracle that recomputes every block from scratch."""

from __future__ import annotations

import pytest
import torch

from services.draft.sequence import DraftSequence
from shared.tokens import EMPTY_TREE, SamplingParams, TokenTree, TreeShape
from tests.helpers.block_setup import BLOCK_SIZE, CHAIN, PAGE_SIZE, TREE, BlockSetup, block_setup
from tests.helpers.dflash_heads import best_block_paths
from tests.helpers.drafting import (
    GREEDY,
    SAMPLED,
    draft_sequence,
    mixed_sequences,
    propose,
    random_text,
)
from tests.helpers.head_oracle import Values, path_values

SHAPES = [CHAIN, TREE, TreeShape(2, 1, 8), TreeShape(9, 1, 3), TreeShape(2, 3, 12)]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> BlockSetup:
    return block_setup(tmp_path_factory.mktemp("heads"))


def _oracle(
    setup: BlockSetup,
    sequence: DraftSequence,
    shape: TreeShape,
    *,
    start: int = 0,
    block_size: int = BLOCK_SIZE,
) -> Values:
    features = setup.features(sequence.token_ids)[: sequence.num_tokens - 1]
    logits = setup.oracle.block_logits(
        sequence.token_ids, features, start=start, block_size=block_size
    )
    return best_block_paths(logits, sequence.sampling, shape, num_tokens=sequence.num_tokens)


def _assert_same(actual: TokenTree, expected: Values) -> None:
    assert expected
    assert path_values(actual) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tree_equals_the_oracle(
    setup: BlockSetup, shape: TreeShape, sampling: SamplingParams
) -> None:
    sequence = draft_sequence(random_text(0, 15), sampling)
    drafter = setup.drafter()
    setup.open(drafter, sequence)
    (tree,) = propose(drafter, shape, sequence)
    _assert_same(tree, _oracle(setup, sequence, shape))


def test_the_default_shape_drafts_a_chain_of_the_whole_block(setup: BlockSetup) -> None:
    sequence = draft_sequence(random_text(0, 15))
    drafter = setup.drafter()
    setup.open(drafter, sequence)
    (tree,) = propose(drafter, CHAIN, sequence)
    assert tree.parent_indices == (None, 0, 1, 2)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_verdicts_that_accept_any_number_keep_to_the_oracle(
    setup: BlockSetup, shape: TreeShape
) -> None:
    sequence = draft_sequence(random_text(1, 9), SAMPLED)
    drafter = setup.drafter()
    setup.open(drafter, sequence)
    for num_accepted in (0, 4, 1, 2, 3, 0, 4):
        (tree,) = propose(drafter, shape, sequence)
        _assert_same(tree, _oracle(setup, sequence, shape))
        deepest = max(range(len(tree)), key=lambda node: tree.depths[node])
        path = [tree.token_ids[node] for node in tree.path(deepest)][:num_accepted]
        setup.commit(drafter, sequence, [*path, *random_text(num_accepted, 1)])
        drafter.check()


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_catching_up_in_chunks_changes_nothing(setup: BlockSetup, chunk: int) -> None:
    sequence = draft_sequence(random_text(2, 30))
    drafter = setup.drafter()
    setup.open(drafter, sequence)
    assert drafter.backlog(sequence) == 29
    assert drafter.reserve(sequence, CHAIN)
    while taken := drafter.catch_up([sequence], chunk):
        assert taken <= chunk
    assert drafter.backlog(sequence) == 0
    (tree,) = propose(drafter, CHAIN, sequence)
    _assert_same(tree, _oracle(setup, sequence, CHAIN))


def test_sequences_of_a_batch_do_not_disturb_each_other(setup: BlockSetup) -> None:
    sequences = mixed_sequences(5, 17, 2, 9)
    drafter = setup.drafter()
    for sequence in sequences:
        setup.open(drafter, sequence)
    trees = propose(drafter, TREE, *sequences)
    for sequence, tree in zip(sequences, trees, strict=True):
        _assert_same(tree, _oracle(setup, sequence, TREE))


def test_a_block_of_another_size_has_as_many_masks(setup: BlockSetup) -> None:
    sequence = draft_sequence(random_text(3, 12))
    drafter = setup.drafter(block_size=8)
    setup.open(drafter, sequence)
    shape = TreeShape(7, 1, 8)
    (tree,) = propose(drafter, shape, sequence)
    assert len(tree) == 7
    _assert_same(tree, _oracle(setup, sequence, shape, block_size=8))


@pytest.mark.parametrize("window", [6, 8, 13])
def test_a_block_sees_the_window_to_the_page_and_no_more(setup: BlockSetup, window: int) -> None:
    sequence = draft_sequence(random_text(4, 5))
    drafter = setup.drafter(window=window)
    setup.open(drafter, sequence)
    starts = set()
    for number in range(10):
        (tree,) = propose(drafter, CHAIN, sequence)
        start = drafter._contexts.kv_of(sequence).window_start
        num_seen = sequence.num_tokens - 1 - start
        assert num_seen == sequence.num_tokens - 1 or window <= num_seen < window + PAGE_SIZE
        starts.add(start)
        _assert_same(tree, _oracle(setup, sequence, CHAIN, start=start))
        setup.commit(drafter, sequence, random_text(number, 3))
        drafter.check()
    assert len(starts) > 2


def test_a_long_prompt_needs_pages_for_the_window_alone(setup: BlockSetup) -> None:
    sequence = draft_sequence(random_text(5, 90))
    drafter = setup.drafter(window=12, num_pages=7)
    setup.open(drafter, sequence)
    assert drafter.backlog(sequence) == 12
    (tree,) = propose(drafter, CHAIN, sequence)
    _assert_same(tree, _oracle(setup, sequence, CHAIN, start=77))


def test_features_that_begin_in_the_middle_begin_the_context(setup: BlockSetup) -> None:
    sequence = draft_sequence(random_text(6, 20))
    drafter = setup.drafter()
    drafter.open(sequence)
    assert drafter.reserve(sequence, CHAIN)
    drafter.add_features(sequence, setup.sent(sequence, 7, 19))
    (tree,) = propose(drafter, CHAIN, sequence)
    _assert_same(tree, _oracle(setup, sequence, CHAIN, start=7))


def test_a_sequence_without_its_features_gets_an_empty_tree(setup: BlockSetup) -> None:
    late, ready = (
        draft_sequence(random_text(7, 9), number=1),
        draft_sequence(random_text(8, 9), number=2),
    )
    drafter = setup.drafter()
    drafter.open(late)
    drafter.add_features(late, setup.sent(late, 0, 7))
    setup.open(drafter, ready)
    trees = propose(drafter, CHAIN, late, ready)
    assert trees[0] == EMPTY_TREE
    _assert_same(trees[1], _oracle(setup, ready, CHAIN))
    drafter.add_features(late, setup.sent(late, 7, 8))
    (tree,) = propose(drafter, CHAIN, late)
    _assert_same(tree, _oracle(setup, late, CHAIN))


def test_what_does_not_fit_is_not_reserved_and_closing_frees_it_all(setup: BlockSetup) -> None:
    drafter = setup.drafter(num_pages=8)
    first, second = (
        draft_sequence(random_text(1, 12), number=1),
        draft_sequence(random_text(2, 12), number=2),
    )
    setup.open(drafter, first)
    setup.open(drafter, second)
    assert drafter.reserve(first, CHAIN)
    assert not drafter.reserve(second, CHAIN)
    drafter.check()
    drafter.close(first)
    (tree,) = propose(drafter, CHAIN, second)
    _assert_same(tree, _oracle(setup, second, CHAIN))
    drafter.close(second)
    assert drafter.gauges()["free_page_count"] == 7


def test_penalties_and_bias_shape_every_position(setup: BlockSetup) -> None:
    tokens = random_text(9, 15)
    features = setup.features(tokens)[:14]
    logits = setup.oracle.block_logits(tokens, features)
    plain = logits.argmax(1).tolist()
    sampling = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, logit_bias={plain[2]: -100.0}
    )
    sequence = draft_sequence(tokens, sampling)
    drafter = setup.drafter()
    setup.open(drafter, sequence)
    (tree,) = propose(drafter, CHAIN, sequence)
    said = torch.tensor(sorted(set(tokens)))
    logits[:, said] = torch.where(logits[:, said] > 0, logits[:, said] / 2, logits[:, said] * 2)
    logits[:, plain[2]] -= 100.0
    assert list(tree.token_ids) == logits.argmax(1).tolist() != plain
