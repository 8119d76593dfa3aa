"""Next-token layers as drafters against an oracle that recomputes every path from scratch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.runtime.head_runner import HeadRunner
from shared.tokens import EMPTY_TREE, SamplingParams, TokenTree, TreeShape
from tests.helpers.drafting import GREEDY, SAMPLED, committed, draft_sequence, propose, random_text
from tests.helpers.head_oracle import Values, best_paths, path_values
from tests.helpers.mtp_heads import MtpOracle, TinyMtp, write_mtp

PAGE_SIZE = 4
CPU = torch.device("cpu")
MTPS = {
    "deepseek 1": TinyMtp(),
    "mimo 1": TinyMtp("mimo"),
    "deepseek 2": TinyMtp(num_layers=2),
    "deepseek 3": TinyMtp(num_layers=3),
    "mimo 3": TinyMtp("mimo", num_layers=3),
}
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


@dataclass(frozen=True)
class Setup:
    """One head, its oracle, and a target whose features are a function of the tokens before."""

    head: DraftHead
    oracle: MtpOracle

    def drafter(
        self, *, num_pages: int = 200, context: int = 128, keeps_features: bool = False
    ) -> EagleDrafter:
        kind = EagleDrafter if len(self.head.layers) == 1 else MultiLayerDrafter
        pool = KvPool(self.head.kv_layout(PAGE_SIZE), num_pages, CPU)
        return kind(
            HeadRunner(self.head, pool),
            KvLeases(num_pages, PAGE_SIZE, prefix_cache=len(self.head.layers) == 1),
            max_context_tokens=context,
            keeps_features=keeps_features,
        )

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """`[N, H]`; row p depends on tokens 0 … p."""
        seed, rows = 0, []
        for token in token_ids:
            seed = (seed * 1_000_003 + token + 1) % 2**31
            rows.append(torch.randn(32, generator=torch.Generator().manual_seed(seed)))
        return torch.stack(rows)

    def sent(self, sequence: DraftSequence, start: int, end: int) -> FeatureRows:
        """What the target sends of positions `[start, end)`."""
        return FeatureRows(start, self.features(sequence.token_ids[:end])[start:])


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Setup]:
    setups = {}
    for name, mtp in MTPS.items():
        folder = write_mtp(tmp_path_factory.mktemp("mtp"), mtp)
        target = TargetFolder(folder, dtype=torch.float32, device=CPU)
        head = load_mtp(folder, target, dtype=torch.float32, device=CPU)
        setups[name] = Setup(head, MtpOracle(mtp, folder))
    return setups


@pytest.fixture(params=["mimo 1", "deepseek 3"])
def setup(request: pytest.FixtureRequest, setups: dict[str, Setup]) -> Setup:
    return setups[request.param]


def _open(drafter: EagleDrafter, setup: Setup, sequence: DraftSequence) -> None:
    drafter.open(sequence)
    drafter.add_features(sequence, setup.sent(sequence, 0, sequence.num_tokens - 1))


def _commit(
    drafter: EagleDrafter, setup: Setup, sequence: DraftSequence, tokens: Sequence[int]
) -> None:
    start = sequence.num_tokens - 1
    verdict = committed(sequence, tokens)
    drafter.commit(sequence, verdict, setup.sent(sequence, start, sequence.num_tokens - 1))


def _oracle(setup: Setup, sequence: DraftSequence, shape: TreeShape, *, window: int = 0) -> Values:
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
    name: str, setups: dict[str, Setup], shape: TreeShape, sampling: SamplingParams
) -> None:
    setup, sequence = setups[name], draft_sequence(random_text(0, 15), sampling)
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    (tree,) = propose(drafter, shape, sequence)
    _assert_same(tree, _oracle(setup, sequence, shape))


@pytest.mark.parametrize("shape", [TREE, TreeShape(5, 1, 6), TreeShape(1, 2, 3)], ids=str)
@pytest.mark.parametrize("name", MTPS)
def test_rounds_of_any_length_keep_to_the_oracle(
    name: str, setups: dict[str, Setup], shape: TreeShape
) -> None:
    setup, sequence = setups[name], draft_sequence(random_text(1, 9))
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    for number, count in enumerate((1, 4, 1, 1, 2, 6, 3)):
        (tree,) = propose(drafter, shape, sequence)
        _assert_same(tree, _oracle(setup, sequence, shape))
        # Of every other round the target follows the tree as far as it goes.
        path = [tree.token_ids[node] for node in tree.path(len(tree) - 1)] if number % 2 else []
        _commit(drafter, setup, sequence, [*path, *random_text(number, count)][:count])
        drafter.check()


def test_layers_take_their_own_step_only(setups: dict[str, Setup]) -> None:
    """Without the second layer the same checkpoint drafts something else from level 2 on."""
    setup, sequence = setups["deepseek 2"], draft_sequence(random_text(0, 15))
    oracle = setup.oracle
    alone = copy.copy(oracle)
    alone.mtp = TinyMtp(num_layers=1)
    shape, features = TreeShape(2, 1, 3), setup.features(sequence.token_ids)[:-1]
    (first,) = _oracle(setup, sequence, TreeShape(1, 1, 2))
    one = oracle.continue_path(sequence.token_ids, features, first)
    other = alone.continue_path(sequence.token_ids, features, first)
    assert not torch.allclose(one, other, atol=1e-2)
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    (tree,) = propose(drafter, shape, sequence)
    assert tree.token_ids[1] == int(one.argmax())


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_catching_up_in_chunks_changes_nothing(setup: Setup, chunk: int) -> None:
    sequence = draft_sequence(random_text(2, 30))
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    assert drafter.reserve(sequence, TREE)
    while taken := drafter.catch_up([sequence], chunk):
        assert taken <= chunk
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE))


@pytest.mark.parametrize("shape", [TREE, TreeShape(5, 1, 6)], ids=str)
def test_sequences_of_a_batch_do_not_disturb_each_other(setup: Setup, shape: TreeShape) -> None:
    lengths = (5, 17, 9)
    sequences = [
        draft_sequence(random_text(n, length), number=n) for n, length in enumerate(lengths)
    ]
    drafter = setup.drafter()
    for sequence in sequences:
        _open(drafter, setup, sequence)
    trees = propose(drafter, shape, *sequences)
    for sequence, tree in zip(sequences, trees, strict=True):
        _assert_same(tree, _oracle(setup, sequence, shape))


def test_a_sequence_shorter_than_the_layers_gets_an_empty_tree(setups: dict[str, Setup]) -> None:
    setup = setups["deepseek 3"]
    for num_tokens, is_empty in ((2, True), (3, True), (4, False)):
        sequence = draft_sequence(random_text(3, num_tokens), number=num_tokens)
        drafter = setup.drafter()
        _open(drafter, setup, sequence)
        (tree,) = propose(drafter, TREE, sequence)
        assert (tree == EMPTY_TREE) == is_empty


def test_a_window_slides_over_a_sequence_longer_than_the_context(setup: Setup) -> None:
    sequence = draft_sequence(random_text(4, 20))
    drafter = setup.drafter(context=64, keeps_features=True)
    _open(drafter, setup, sequence)
    starts = set()
    for number in range(12):
        (tree,) = propose(drafter, TREE, sequence)
        start = drafter._contexts.kv_of(sequence).window_start
        starts.add(start)
        _assert_same(tree, _oracle(setup, sequence, TREE, window=start))
        _commit(drafter, setup, sequence, random_text(number, 3))
    assert len(starts) > 1


def test_closing_frees_every_page(setup: Setup) -> None:
    sequence = draft_sequence(random_text(5, 20))
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    propose(drafter, TREE, sequence)
    drafter.close(sequence)
    drafter.flush_prefix_cache()
    drafter.check()
    assert drafter.gauges()["free_page_count"] == 199
