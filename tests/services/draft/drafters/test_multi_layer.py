"""Next-token layers as drafters against an oracle that recomputes every path from scratch."""

from __future__ import annotations

import copy

import pytest
import torch

from services.draft.sequence import DraftSequence
from shared.tokens import EMPTY_TREE, SamplingParams, TokenTree, TreeShape
from tests.helpers.drafting import GREEDY, SAMPLED, draft_sequence, propose, random_text
from tests.helpers.head_oracle import Values, best_paths, path_values
from tests.helpers.mtp_setup import MTPS, MtpSetup, mtp_setup

SHAPES = [
    TreeShape(1, 1, 2),
    TreeShape(2, 1, 3),
    TreeShape(5, 1, 6),
    TreeShape(1, 5, 4),
    TreeShape(2, 3, 8),
    TreeShape(3, 2, 30),
    TreeShape(5, 3, 16),
]
TREE = TreeShape(4, 3, 9)


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MtpSetup]:
    return {name: mtp_setup(tmp_path_factory.mktemp("mtp"), mtp) for name, mtp in MTPS.items()}


@pytest.fixture(params=["mimo 1", "deepseek 3"])
def setup(request: pytest.FixtureRequest, setups: dict[str, MtpSetup]) -> MtpSetup:
    return setups[request.param]


def _oracle(
    setup: MtpSetup, sequence: DraftSequence, shape: TreeShape, *, window: int = 0
) -> Values:
    features = setup.features(sequence.token_ids)[window : sequence.num_tokens - 1]
    tokens, sampling = sequence.token_ids[window:], sequence.sampling
    return best_paths(setup.oracle, tokens, features, sampling, shape, num_before=window)


def _assert_same(actual: TokenTree, expected: Values) -> None:
    assert expected
    assert path_values(actual) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MTPS)
def test_tree_equals_the_naive_oracle(
    name: str, setups: dict[str, MtpSetup], shape: TreeShape, sampling: SamplingParams
) -> None:
    setup, sequence = setups[name], draft_sequence(random_text(0, 15), sampling)
    drafter = setup.drafter()
    setup.open(drafter, sequence)
    (tree,) = propose(drafter, shape, sequence)
    _assert_same(tree, _oracle(setup, sequence, shape))


@pytest.mark.parametrize("shape", [TREE, TreeShape(5, 1, 6), TreeShape(1, 2, 3)], ids=str)
@pytest.mark.parametrize("name", MTPS)
def test_rounds_of_any_length_keep_to_the_oracle(
    name: str, setups: dict[str, MtpSetup], shape: TreeShape
) -> None:
    setup, sequence = setups[name], draft_sequence(random_text(1, 9))
    drafter = setup.drafter()
    setup.open(drafter, sequence)
    for number, count in enumerate((1, 4, 1, 1, 2, 6, 3)):
        (tree,) = propose(drafter, shape, sequence)
        _assert_same(tree, _oracle(setup, sequence, shape))
        # Of every other round the target follows the tree as far as it goes.
        path = [tree.token_ids[node] for node in tree.path(len(tree) - 1)] if number % 2 else []
        setup.commit(drafter, sequence, [*path, *random_text(number, count)][:count])
        drafter.check()


def test_layers_take_their_own_step_only(setups: dict[str, MtpSetup]) -> None:
    """Without the second layer the same checkpoint drafts something else from level 2 on."""
    setup, sequence = setups["deepseek 2"], draft_sequence(random_text(0, 15))
    oracle = setup.oracle
    alone = copy.deepcopy(oracle)
    alone.num_layers = 1
    shape, features = TreeShape(2, 1, 3), setup.features(sequence.token_ids)[:-1]
    (first,) = _oracle(setup, sequence, TreeShape(1, 1, 2))
    one = oracle.continue_path(sequence.token_ids, features, first)
    other = alone.continue_path(sequence.token_ids, features, first)
    assert not torch.allclose(one, other, atol=1e-2)
    drafter = setup.drafter()
    setup.open(drafter, sequence)
    (tree,) = propose(drafter, shape, sequence)
    assert tree.token_ids[1] == int(one.argmax())


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_catching_up_in_chunks_changes_nothing(setup: MtpSetup, chunk: int) -> None:
    sequence = draft_sequence(random_text(2, 30))
    drafter = setup.drafter()
    setup.open(drafter, sequence)
    assert drafter.reserve(sequence, TREE)
    while taken := drafter.catch_up([sequence], chunk):
        assert taken <= chunk
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE))


@pytest.mark.parametrize("shape", [TREE, TreeShape(5, 1, 6)], ids=str)
def test_sequences_of_a_batch_do_not_disturb_each_other(setup: MtpSetup, shape: TreeShape) -> None:
    lengths = (5, 17, 9)
    sequences = [
        draft_sequence(random_text(n, length), number=n) for n, length in enumerate(lengths)
    ]
    drafter = setup.drafter()
    for sequence in sequences:
        setup.open(drafter, sequence)
    trees = propose(drafter, shape, *sequences)
    for sequence, tree in zip(sequences, trees, strict=True):
        _assert_same(tree, _oracle(setup, sequence, shape))


def test_a_sequence_shorter_than_the_layers_gets_an_empty_tree(setups: dict[str, MtpSetup]) -> None:
    setup = setups["deepseek 3"]
    for num_tokens, is_empty in ((2, True), (3, True), (4, False)):
        sequence = draft_sequence(random_text(3, num_tokens), number=num_tokens)
        drafter = setup.drafter()
        setup.open(drafter, sequence)
        (tree,) = propose(drafter, TREE, sequence)
        assert (tree == EMPTY_TREE) == is_empty


def test_a_window_slides_over_a_sequence_longer_than_the_context(setup: MtpSetup) -> None:
    sequence = draft_sequence(random_text(4, 20))
    drafter = setup.drafter(context=64, keeps_features=True)
    setup.open(drafter, sequence)
    starts = set()
    for number in range(12):
        (tree,) = propose(drafter, TREE, sequence)
        start = drafter._contexts.kv_of(sequence).window_start
        starts.add(start)
        _assert_same(tree, _oracle(setup, sequence, TREE, window=start))
        setup.commit(drafter, sequence, random_text(number, 3))
    assert len(starts) > 1


def test_closing_frees_every_page(setup: MtpSetup) -> None:
    sequence = draft_sequence(random_text(5, 20))
    drafter = setup.drafter()
    setup.open(drafter, sequence)
    propose(drafter, TREE, sequence)
    drafter.close(sequence)
    drafter.flush_prefix_cache()
    drafter.check()
    assert drafter.gauges()["free_page_count"] == 199
