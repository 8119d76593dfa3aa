"""The block drafter against an oracle that recomputes every block from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.draft.drafters.dflash import DflashDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from shared.kv.pool import KvPool
from shared.models.heads.dflash import DflashHead
from shared.models.heads.dflash_loader import load_dflash
from shared.models.heads.target_tensors import TargetFolder
from shared.runtime.block_runner import BlockRunner
from shared.tokens import EMPTY_TREE, SamplingParams, TokenTree, TreeShape
from tests.helpers.checkpoints import TinyShape, build_model, write_checkpoint
from tests.helpers.dflash_heads import (
    DflashOracle,
    TinyDflash,
    best_block_paths,
    write_dflash,
)
from tests.helpers.drafting import (
    GREEDY,
    SAMPLED,
    VOCAB_SIZE,
    committed,
    draft_sequence,
    propose,
    random_text,
)
from tests.helpers.head_oracle import Values, path_values

PAGE_SIZE = 4
BLOCK_SIZE = 5
CPU = torch.device("cpu")
TARGET_SHAPE = TinyShape(vocab_size=VOCAB_SIZE, num_layers=6)
CHAIN = TreeShape(BLOCK_SIZE - 1, 1, BLOCK_SIZE)
TREE = TreeShape(BLOCK_SIZE - 1, 4, 24)
SHAPES = [CHAIN, TREE, TreeShape(2, 1, 8), TreeShape(9, 1, 3), TreeShape(2, 3, 12)]


@dataclass(frozen=True)
class Setup:
    """One head, its oracle, and a target whose features are a function of the tokens before."""

    head: DflashHead
    oracle: DflashOracle

    def drafter(
        self, *, num_pages: int = 100, window: int = 120, block_size: int = BLOCK_SIZE
    ) -> DflashDrafter:
        pool = KvPool(self.head.kv_layout(PAGE_SIZE), num_pages, CPU)
        return DflashDrafter(
            BlockRunner(self.head, pool), num_pages, block_size=block_size, window_tokens=window
        )

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """`[N, K * H]`; row p depends on tokens 0 … p."""
        seed, rows = 0, []
        for token in token_ids:
            seed = (seed * 1_000_003 + token + 1) % 2**31
            rows.append(torch.randn(96, generator=torch.Generator().manual_seed(seed)))
        return torch.stack(rows)

    def sent(self, sequence: DraftSequence, start: int, end: int) -> FeatureRows:
        """What the target sends of positions `[start, end)`."""
        projection = self.head.feature_spec.projection
        assert projection is not None
        return FeatureRows(start, self.features(sequence.token_ids[:end])[start:] @ projection.T)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    target = write_checkpoint(tmp_path_factory.mktemp("target"), shape=TARGET_SHAPE)
    tiny = TinyDflash(block_size=BLOCK_SIZE)
    head = load_dflash(
        write_dflash(tmp_path_factory.mktemp("head"), tiny),
        TargetFolder(target, dtype=torch.float32, device=CPU),
        dtype=torch.float32,
        device=CPU,
    )
    weights = build_model("llama", TARGET_SHAPE).state_dict()
    oracle = DflashOracle(
        tiny,
        target_embedding=weights["model.embed_tokens.weight"],
        target_lm_head=weights["lm_head.weight"],
    )
    return Setup(head, oracle)


def _open(drafter: DflashDrafter, setup: Setup, sequence: DraftSequence) -> None:
    drafter.open(sequence)
    drafter.add_features(sequence, setup.sent(sequence, 0, sequence.num_tokens - 1))


def _commit(
    drafter: DflashDrafter, setup: Setup, sequence: DraftSequence, tokens: Sequence[int]
) -> None:
    start = sequence.num_tokens - 1
    verdict = committed(sequence, tokens)
    drafter.commit(sequence, verdict, setup.sent(sequence, start, sequence.num_tokens - 1))


def _oracle(
    setup: Setup,
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
def test_tree_equals_the_oracle(setup: Setup, shape: TreeShape, sampling: SamplingParams) -> None:
    sequence = draft_sequence(random_text(0, 15), sampling)
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    (tree,) = propose(drafter, shape, sequence)
    _assert_same(tree, _oracle(setup, sequence, shape))


def test_the_default_shape_drafts_a_chain_of_the_whole_block(setup: Setup) -> None:
    sequence = draft_sequence(random_text(0, 15))
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    (tree,) = propose(drafter, CHAIN, sequence)
    assert tree.parent_indices == (None, 0, 1, 2)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_verdicts_that_accept_any_number_keep_to_the_oracle(setup: Setup, shape: TreeShape) -> None:
    sequence = draft_sequence(random_text(1, 9), SAMPLED)
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    for num_accepted in (0, 4, 1, 2, 3, 0, 4):
        (tree,) = propose(drafter, shape, sequence)
        _assert_same(tree, _oracle(setup, sequence, shape))
        deepest = max(range(len(tree)), key=lambda node: tree.depths[node])
        path = [tree.token_ids[node] for node in tree.path(deepest)][:num_accepted]
        _commit(drafter, setup, sequence, [*path, *random_text(num_accepted, 1)])
        drafter.check()


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_catching_up_in_chunks_changes_nothing(setup: Setup, chunk: int) -> None:
    sequence = draft_sequence(random_text(2, 30))
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    assert drafter.backlog(sequence) == 29
    assert drafter.reserve(sequence, CHAIN)
    while taken := drafter.catch_up([sequence], chunk):
        assert taken <= chunk
    assert drafter.backlog(sequence) == 0
    (tree,) = propose(drafter, CHAIN, sequence)
    _assert_same(tree, _oracle(setup, sequence, CHAIN))


def test_sequences_of_a_batch_do_not_disturb_each_other(setup: Setup) -> None:
    sequences = [
        draft_sequence(random_text(n, length), [GREEDY, SAMPLED][n % 2], number=n)
        for n, length in enumerate((5, 17, 2, 9))
    ]
    drafter = setup.drafter()
    for sequence in sequences:
        _open(drafter, setup, sequence)
    trees = propose(drafter, TREE, *sequences)
    for sequence, tree in zip(sequences, trees, strict=True):
        _assert_same(tree, _oracle(setup, sequence, TREE))


def test_a_block_of_another_size_has_as_many_masks(setup: Setup) -> None:
    sequence = draft_sequence(random_text(3, 12))
    drafter = setup.drafter(block_size=8)
    _open(drafter, setup, sequence)
    shape = TreeShape(7, 1, 8)
    (tree,) = propose(drafter, shape, sequence)
    assert len(tree) == 7
    _assert_same(tree, _oracle(setup, sequence, shape, block_size=8))


@pytest.mark.parametrize("window", [6, 8, 13])
def test_a_block_sees_the_window_to_the_page_and_no_more(setup: Setup, window: int) -> None:
    sequence = draft_sequence(random_text(4, 5))
    drafter = setup.drafter(window=window)
    _open(drafter, setup, sequence)
    starts = set()
    for number in range(10):
        (tree,) = propose(drafter, CHAIN, sequence)
        context = drafter._states[sequence.key].context
        num_seen = sequence.num_tokens - 1 - context.start
        assert num_seen == sequence.num_tokens - 1 or window <= num_seen < window + PAGE_SIZE
        starts.add(context.start)
        _assert_same(tree, _oracle(setup, sequence, CHAIN, start=context.start))
        _commit(drafter, setup, sequence, random_text(number, 3))
        drafter.check()
    assert len(starts) > 2


def test_a_long_prompt_needs_pages_for_the_window_alone(setup: Setup) -> None:
    sequence = draft_sequence(random_text(5, 90))
    drafter = setup.drafter(window=12, num_pages=7)
    _open(drafter, setup, sequence)
    assert drafter.backlog(sequence) == 12
    (tree,) = propose(drafter, CHAIN, sequence)
    _assert_same(tree, _oracle(setup, sequence, CHAIN, start=77))


def test_features_that_begin_in_the_middle_begin_the_context(setup: Setup) -> None:
    sequence = draft_sequence(random_text(6, 20))
    drafter = setup.drafter()
    drafter.open(sequence)
    assert drafter.reserve(sequence, CHAIN)
    drafter.add_features(sequence, setup.sent(sequence, 7, 19))
    (tree,) = propose(drafter, CHAIN, sequence)
    _assert_same(tree, _oracle(setup, sequence, CHAIN, start=7))


def test_a_sequence_without_its_features_gets_an_empty_tree(setup: Setup) -> None:
    late, ready = (
        draft_sequence(random_text(7, 9), number=1),
        draft_sequence(random_text(8, 9), number=2),
    )
    drafter = setup.drafter()
    drafter.open(late)
    drafter.add_features(late, setup.sent(late, 0, 7))
    _open(drafter, setup, ready)
    trees = propose(drafter, CHAIN, late, ready)
    assert trees[0] == EMPTY_TREE
    _assert_same(trees[1], _oracle(setup, ready, CHAIN))
    drafter.add_features(late, setup.sent(late, 7, 8))
    (tree,) = propose(drafter, CHAIN, late)
    _assert_same(tree, _oracle(setup, late, CHAIN))


def test_what_does_not_fit_is_not_reserved_and_closing_frees_it_all(setup: Setup) -> None:
    drafter = setup.drafter(num_pages=8)
    first, second = (
        draft_sequence(random_text(1, 12), number=1),
        draft_sequence(random_text(2, 12), number=2),
    )
    _open(drafter, setup, first)
    _open(drafter, setup, second)
    assert drafter.reserve(first, CHAIN)
    assert not drafter.reserve(second, CHAIN)
    drafter.check()
    drafter.close(first)
    (tree,) = propose(drafter, CHAIN, second)
    _assert_same(tree, _oracle(setup, second, CHAIN))
    drafter.close(second)
    assert drafter.gauges()["free_page_count"] == 7


def test_penalties_and_bias_shape_every_position(setup: Setup) -> None:
    tokens = random_text(9, 15)
    features = setup.features(tokens)[:14]
    logits = setup.oracle.block_logits(tokens, features)
    plain = logits.argmax(1).tolist()
    sampling = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, logit_bias={plain[2]: -100.0}
    )
    sequence = draft_sequence(tokens, sampling)
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    (tree,) = propose(drafter, CHAIN, sequence)
    said = torch.tensor(sorted(set(tokens)))
    logits[:, said] = torch.where(logits[:, said] > 0, logits[:, said] / 2, logits[:, said] * 2)
    logits[:, plain[2]] -= 100.0
    assert list(tree.token_ids) == logits.argmax(1).tolist() != plain
