"""Heads as drafters against a naive oracle that recomputes every path from scratch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.draft.drafters.contexts import CONTEXT_MARGIN
from services.draft.drafters.drafter import Proposal
from services.draft.drafters.eagle import EagleDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.heads.config import HeadKind
from shared.models.heads.head import DraftHead
from shared.models.heads.loader import load_head
from shared.models.heads.target_tensors import TargetFolder
from shared.runtime.tree_model import HeadModel
from shared.tokens import Outcome, SamplingParams, TokenTree, TreeShape, Verdict
from tests.helpers.checkpoints import TinyShape, build_model, write_checkpoint
from tests.helpers.draft_heads import HEADS, head_tensors, write_head
from tests.helpers.drafting import (
    GREEDY,
    OUTCOME_BUDGET,
    SAMPLED,
    VOCAB_SIZE,
    committed,
    draft_sequence,
    foreseen_tokens,
    plain_grower,
    prepare_ahead,
    propose,
    random_text,
)
from tests.helpers.head_oracle import Behind, HeadOracle, Values, best_paths, path_values

PAGE_SIZE = 4
TARGET_SHAPE = TinyShape(vocab_size=VOCAB_SIZE, num_layers=4)
TOKEN_MAP = sorted(random.Random(5).sample(range(VOCAB_SIZE), 12))
SHAPES = [
    TreeShape(1, 1, 2),
    TreeShape(4, 1, 5),
    TreeShape(6, 1, 3),
    TreeShape(1, 5, 4),
    TreeShape(2, 3, 8),
    TreeShape(5, 4, 8),
    TreeShape(4, 4, 16),
    TreeShape(3, 2, 30),
]
TREE = TreeShape(3, 3, 9)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    """One head, its oracle, and a target whose features are a function of the tokens before."""

    head: DraftHead
    oracle: HeadOracle

    def drafter(
        self,
        *,
        num_pages: int = 200,
        context: int = 128,
        keeps_features: bool = False,
    ) -> EagleDrafter:
        pool = KvPool(self.head.kv_layout(PAGE_SIZE), num_pages, CPU)
        return EagleDrafter(
            HeadModel(self.head, pool),
            KvLeases(num_pages, PAGE_SIZE),
            max_context_tokens=context,
            keeps_features=keeps_features,
            grower=plain_grower(HeadModel(self.head, pool), context),
        )

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """`[N, W]` as the oracle reads them; row p depends on tokens 0 … p."""
        head = self.oracle.head
        width = head.target_hidden_size * (head.num_features if head.kind == "EAGLE3" else 1)
        seed, rows = 0, []
        for token in token_ids:
            seed = (seed * 1_000_003 + token + 1) % 2**31
            rows.append(torch.randn(width, generator=torch.Generator().manual_seed(seed)))
        return torch.stack(rows)

    def sent(self, sequence: DraftSequence, start: int, end: int) -> FeatureRows:
        """What the target sends of positions `[start, end)`."""
        rows = self.features(sequence.token_ids[:end])[start:]
        projection = self.head.feature_spec.projection
        return FeatureRows(start, rows if projection is None else rows @ projection.T)


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Setup]:
    folder = write_checkpoint(tmp_path_factory.mktemp("target"), shape=TARGET_SHAPE)
    target = build_model("llama", TARGET_SHAPE).state_dict()
    setups = {}
    for name, tiny in HEADS.items():
        head_folder = write_head(tmp_path_factory.mktemp("head"), tiny)
        is_mapped = name == "mapped"
        head = load_head(
            head_folder,
            HeadKind(tiny.kind),
            TargetFolder(folder, dtype=torch.float32, device=CPU),
            dtype=torch.float32,
            device=CPU,
            token_map=torch.tensor(TOKEN_MAP) if is_mapped else None,
        )
        oracle = HeadOracle(
            tiny,
            head_tensors(tiny),
            target_embedding=target["model.embed_tokens.weight"],
            target_lm_head=target["lm_head.weight"],
            token_map=TOKEN_MAP if is_mapped else None,
            feeds_back_norm=bool(tiny.config.get("norm_output")),
        )
        setups[name] = Setup(head, oracle)
    return setups


@pytest.fixture(params=["eagle", "eagle3"])
def setup(request: pytest.FixtureRequest, setups: dict[str, Setup]) -> Setup:
    return setups[request.param]


def _open(drafter: EagleDrafter, setup: Setup, sequence: DraftSequence) -> None:
    """Opens a sequence whose target sends every row it has."""
    drafter.open(sequence)
    if sequence.num_tokens > 1:
        drafter.add_features(sequence, setup.sent(sequence, 0, sequence.num_tokens - 1))


def _commit(
    drafter: EagleDrafter,
    setup: Setup,
    sequence: DraftSequence,
    tokens: Sequence[int],
    *nodes: int,
    with_features: bool = True,
) -> None:
    start = sequence.num_tokens - 1
    verdict = committed(sequence, tokens, *nodes)
    rows = setup.sent(sequence, start, sequence.num_tokens - 1) if with_features else None
    drafter.commit(sequence, verdict, rows)


def _oracle(setup: Setup, sequence: DraftSequence, shape: TreeShape, *, window: int = 0) -> Values:
    features = setup.features(sequence.token_ids)[window : sequence.num_tokens - 1]
    return best_paths(
        setup.oracle,
        sequence.token_ids[window:],
        features,
        sequence.sampling,
        shape,
        num_before=window,
    )


def _assert_same(actual: TokenTree, expected: Values) -> None:
    assert expected
    assert path_values(actual) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_tree_equals_the_naive_oracle(
    name: str, setups: dict[str, Setup], shape: TreeShape, sampling: SamplingParams
) -> None:
    setup = setups[name]
    sequence = draft_sequence(random_text(0, 15), sampling)
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    (tree,) = propose(drafter, shape, sequence)
    _assert_same(tree, _oracle(setup, sequence, shape))


def test_trees_hold_only_tokens_of_the_map(setups: dict[str, Setup]) -> None:
    sequence = draft_sequence(random_text(0, 15), SAMPLED)
    drafter = setups["mapped"].drafter()
    _open(drafter, setups["mapped"], sequence)
    (tree,) = propose(drafter, TreeShape(3, 16, 60), sequence)
    assert set(tree.token_ids) <= set(TOKEN_MAP)
    assert len(tree) == 59


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [TreeShape(4, 1, 5), TreeShape(3, 3, 9)], ids=str)
def test_accepted_rows_are_computed_from_the_targets_features(
    setup: Setup, shape: TreeShape, sampling: SamplingParams
) -> None:
    generator = random.Random(7)
    sequence = draft_sequence(random_text(1, 9), sampling)
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    for _ in range(6):
        (tree,) = propose(drafter, shape, sequence)
        _assert_same(tree, _oracle(setup, sequence, shape))
        node = generator.randrange(len(tree))
        path = tree.path(node)[: generator.randrange(len(tree.path(node)) + 1)]
        tokens = [*(tree.token_ids[n] for n in path), generator.randrange(VOCAB_SIZE)]
        _commit(drafter, setup, sequence, tokens, *path)
        assert drafter.backlog(sequence) == len(tokens)
        drafter.check()


def test_a_verdict_on_another_sources_tree_is_followed_by_its_tokens(setup: Setup) -> None:
    sequence = draft_sequence(random_text(3, 10))
    drafter = setup.drafter()
    _open(drafter, setup, sequence)
    propose(drafter, TREE, sequence)
    # Node indices of a tree this drafter never saw, and a round it did not draft for.
    _commit(drafter, setup, sequence, [1, 2, 3, 4, 5, 6, 7], 0, 3, 9, 11, 12, 14)
    _commit(drafter, setup, sequence, [8])
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE))


def test_without_features_there_is_nothing_to_offer(setup: Setup) -> None:
    drafter = setup.drafter()
    single, waiting = draft_sequence([5], number=1), draft_sequence(random_text(4, 9), number=2)
    for sequence in (single, waiting):
        drafter.open(sequence)
        assert drafter.backlog(sequence) == 0
    assert [len(tree) for tree in propose(drafter, TREE, single, waiting)] == [0, 0]
    drafter.add_features(waiting, setup.sent(waiting, 0, 7))
    assert drafter.backlog(waiting) == 7
    assert [len(tree) for tree in propose(drafter, TREE, single, waiting)] == [0, 0]
    _commit(drafter, setup, single, [6])
    drafter.add_features(waiting, setup.sent(waiting, 7, 8))
    trees = propose(drafter, TREE, single, waiting)
    for tree, sequence in zip(trees, (single, waiting), strict=True):
        _assert_same(tree, _oracle(setup, sequence, TREE))


def test_a_verdict_without_features_costs_rounds_until_they_come(setup: Setup) -> None:
    drafter = setup.drafter()
    sequence = draft_sequence(random_text(4, 9))
    _open(drafter, setup, sequence)
    propose(drafter, TREE, sequence)
    _commit(drafter, setup, sequence, [1, 2], with_features=False)
    assert len(propose(drafter, TREE, sequence)[0]) == 0
    drafter.add_features(sequence, setup.sent(sequence, 8, 10))
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE))


def test_rows_sent_twice_change_nothing(setup: Setup) -> None:
    drafter = setup.drafter()
    sequence = draft_sequence(random_text(5, 12))
    drafter.open(sequence)
    for start, end in ((0, 5), (3, 8), (0, 2), (8, 11), (0, 11)):
        drafter.add_features(sequence, setup.sent(sequence, start, end))
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE))


@pytest.mark.parametrize("start", [1, 6, 13])
def test_a_gap_at_the_front_starts_the_window_after_it(setup: Setup, start: int) -> None:
    drafter = setup.drafter()
    sequence = draft_sequence(random_text(6, 15))
    drafter.open(sequence)
    drafter.add_features(sequence, setup.sent(sequence, start, 14))
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE, window=start))
    drafter.check()


def test_a_draft_that_attaches_to_a_target_without_old_rows_starts_with_the_next(
    setup: Setup,
) -> None:
    drafter = setup.drafter()
    sequence = draft_sequence(random_text(6, 15))
    drafter.open(sequence)
    assert len(propose(drafter, TREE, sequence)[0]) == 0
    _commit(drafter, setup, sequence, [1, 2, 3])
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE, window=14))


@pytest.mark.parametrize("shape", [TreeShape(3, 1, 4), TreeShape(3, 3, 10)], ids=str)
def test_a_batch_proposes_what_each_sequence_alone_would(setup: Setup, shape: TreeShape) -> None:
    texts = [random_text(seed, length) for seed, length in ((5, 3), (6, 17), (7, 2), (8, 30))]
    samplings = [GREEDY, SAMPLED, SAMPLED, GREEDY]
    batch = [draft_sequence(t, s, n) for n, (t, s) in enumerate(zip(texts, samplings, strict=True))]
    drafter = setup.drafter()
    for sequence in batch:
        _open(drafter, setup, sequence)
    together = propose(drafter, shape, *batch)
    for text, sampling, tree in zip(texts, samplings, together, strict=True):
        alone, other = draft_sequence(text, sampling), setup.drafter()
        _open(other, setup, alone)
        _assert_same(propose(other, shape, alone)[0], path_values(tree))


def test_catching_up_in_chunks_changes_nothing(setup: Setup) -> None:
    sequences = [
        draft_sequence(random_text(9, 40), number=1),
        draft_sequence(random_text(10, 23), number=2),
    ]
    drafter = setup.drafter()
    for sequence in sequences:
        _open(drafter, setup, sequence)
        assert drafter.reserve(sequence, TREE)
    chunks = []
    while sum(drafter.backlog(sequence) for sequence in sequences) > 2:
        chunks.append(drafter.catch_up(sequences, 16))
    assert chunks == [16, 16, 16, 11]
    assert drafter.catch_up(sequences, 16) == 0
    for tree, sequence in zip(propose(drafter, TREE, *sequences), sequences, strict=True):
        _assert_same(tree, _oracle(setup, sequence, TREE))


def test_catching_up_follows_the_features(setup: Setup) -> None:
    sequence = draft_sequence(random_text(9, 40))
    drafter = setup.drafter()
    drafter.open(sequence)
    assert drafter.reserve(sequence, TREE)
    taken = [drafter.catch_up([sequence], 64)]
    for start, end in ((0, 10), (10, 11), (11, 39)):
        drafter.add_features(sequence, setup.sent(sequence, start, end))
        taken.append(drafter.catch_up([sequence], 64))
    assert taken == [0, 9, 1, 28]
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE))


def test_a_second_sequence_with_the_same_prompt_reuses_its_pages(setup: Setup) -> None:
    drafter = setup.drafter()
    first, second = (draft_sequence(random_text(11, 22), number=number) for number in (1, 2))
    _open(drafter, setup, first)
    (expected,) = propose(drafter, TREE, first)
    drafter.open(second)
    # Its 20 cached rows need no features, so a target that sends the last one alone will do.
    drafter.add_features(second, setup.sent(second, 20, 21))
    assert drafter.backlog(second) == 1
    (tree,) = propose(drafter, TREE, second)
    _assert_same(tree, path_values(expected))
    drafter.check()


def test_another_first_token_is_another_prefix(setup: Setup) -> None:
    drafter = setup.drafter()
    text = random_text(11, 22)
    first = draft_sequence(text, number=1)
    second = draft_sequence([(text[0] + 1) % VOCAB_SIZE, *text[1:]], number=2)
    _open(drafter, setup, first)
    propose(drafter, TREE, first)
    _open(drafter, setup, second)
    assert drafter.backlog(second) == 21, "every feature depends on the first token"
    (tree,) = propose(drafter, TREE, second)
    _assert_same(tree, _oracle(setup, second, TREE))


def test_windows_that_start_in_the_middle_share_no_pages_with_others(setup: Setup) -> None:
    drafter = setup.drafter()
    text = random_text(12, 30)
    first, second = (
        draft_sequence(text, number=1),
        draft_sequence([*random_text(13, 4), *text[4:]], number=2),
    )
    for sequence in (first, second):
        drafter.open(sequence)
        drafter.add_features(sequence, setup.sent(sequence, 4, 29))
        (tree,) = propose(drafter, TREE, sequence)
        _assert_same(tree, _oracle(setup, sequence, TREE, window=4))


def test_a_sequence_that_outgrows_the_context_slides_its_window(setup: Setup) -> None:
    limit = 66
    kept = (limit - CONTEXT_MARGIN) // 2
    drafter = setup.drafter(context=limit, keeps_features=True)
    sequence = draft_sequence(random_text(14, 30))
    _open(drafter, setup, sequence)
    windows = [0]
    generator = random.Random(14)
    for _ in range(20):
        (tree,) = propose(drafter, TREE, sequence)
        _assert_same(tree, _oracle(setup, sequence, TREE, window=windows[-1]))
        _commit(
            drafter, setup, sequence, random_text(generator.randrange(99), generator.choice([1, 3]))
        )
        if sequence.num_tokens - 1 - windows[-1] > limit - CONTEXT_MARGIN:
            windows.append(sequence.num_tokens - 1 - kept)
            assert drafter.backlog(sequence) == kept
        drafter.check()
    assert len(windows) > 2
    assert drafter.gauges()["held_feature_row_count"] <= 2 * kept


def test_a_window_without_kept_features_starts_with_the_newest(setup: Setup) -> None:
    drafter = setup.drafter(context=66)
    sequence = draft_sequence(random_text(14, 34))
    _open(drafter, setup, sequence)
    propose(drafter, TREE, sequence)
    _commit(drafter, setup, sequence, [1, 2])
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE, window=33))


def test_a_prompt_longer_than_the_context_starts_with_a_window(setup: Setup) -> None:
    drafter = setup.drafter(context=66, keeps_features=True)
    sequence = draft_sequence(random_text(15, 120))
    drafter.open(sequence)
    for start in range(0, 119, 17):
        end = min(start + 17, 119)
        drafter.add_features(sequence, setup.sent(sequence, start, end))
    window = 119 - (66 - CONTEXT_MARGIN) // 2
    assert drafter.backlog(sequence) == 119 - window
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE, window=window))


def test_used_features_are_freed(setup: Setup) -> None:
    drafter = setup.drafter()
    sequence = draft_sequence(random_text(16, 20))
    _open(drafter, setup, sequence)
    assert drafter.gauges()["held_feature_row_count"] == 19
    propose(drafter, TREE, sequence)
    assert drafter.gauges()["held_feature_row_count"] == 0


def test_reserving_fails_without_change_when_pages_are_short(setup: Setup) -> None:
    drafter = setup.drafter(num_pages=6)
    shape = TreeShape(3, 1, 4)
    fits, too_long = (
        draft_sequence(random_text(14, 11), number=1),
        draft_sequence(random_text(15, 13), number=2),
    )
    for sequence in (fits, too_long):
        _open(drafter, setup, sequence)
    assert drafter.reserve(fits, shape)
    assert not drafter.reserve(too_long, shape)
    drafter.check()
    drafter.close(fits)
    assert drafter.reserve(too_long, shape)


def test_every_page_has_one_owner_through_churn(setup: Setup) -> None:
    generator = random.Random(16)
    drafter = setup.drafter(num_pages=60)
    shape = TreeShape(2, 2, 5)
    live: dict[int, DraftSequence] = {}
    for number in range(30):
        sequence = draft_sequence(
            random_text(number % 5, generator.randrange(1, 40)), number=number
        )
        drafter.open(sequence)
        first = generator.choice([0, 0, 3])
        if sequence.num_tokens - 1 > first:
            rows = setup.sent(sequence, first, sequence.num_tokens - 1)
            drafter.add_features(sequence, rows)
        if not drafter.reserve(sequence, shape):
            drafter.close(sequence)
            drafter.close(live.pop(min(live)))
            continue
        live[number] = sequence
        batch = [s for s in live.values() if drafter.reserve(s, shape)]
        drafter.propose(batch, shape)
        for held in batch:
            tokens = random_text(number, generator.randrange(1, 4))
            _commit(drafter, setup, held, tokens, with_features=generator.random() < 0.9)
        drafter.check()
    for sequence in live.values():
        drafter.close(sequence)
    drafter.flush_prefix_cache()
    drafter.check()
    gauges = drafter.gauges()
    assert gauges["free_page_count"] == gauges["page_count"]


def test_what_it_accepts_and_needs_is_the_heads(setup: Setup) -> None:
    limits = setup.drafter().limits
    assert limits.vocab_size == VOCAB_SIZE
    assert limits.feature_spec is setup.head.feature_spec


def test_a_target_that_draws_otherwise_is_not_mirrored(setup: Setup) -> None:
    """The negative control of the noise: without it the trees of two seeds are the same."""
    trees = []
    for mirrors_noise in (True, False):
        for seed in (1, 2):
            sequence = draft_sequence(
                random_text(0, 15), SamplingParams(temperature=1.0, seed=seed)
            )
            sequence.mirrors_noise = mirrors_noise
            drafter = setup.drafter()
            _open(drafter, setup, sequence)
            trees += propose(drafter, TREE, sequence)
    assert trees[0] != trees[1]
    assert trees[2] == trees[3]


def _follow(
    drafter: EagleDrafter,
    setup: Setup,
    sequence: DraftSequence,
    tree: TokenTree,
    proposal: Proposal,
) -> None:
    """Commits the verdict that a tree was prepared for, with the target's features."""
    assert proposal.condition is not None
    node = proposal.condition.node_index
    path = [] if node is None else [tree.token_ids[each] for each in tree.path(node)]
    tokens = (*path, proposal.condition.bonus_token_id)
    start = sequence.num_tokens - 1
    sequence.token_ids.extend(tokens)
    verdict = Verdict(1, 0, Outcome.VERIFIED, (), tokens, sequence.num_tokens)
    drafter.commit(sequence, verdict, setup.sent(sequence, start, sequence.num_tokens - 1))


@pytest.mark.parametrize(
    ("name", "shape", "sampling"),
    [
        # Few levels: the states of heads of random weights grow with each.
        (name, shape, [GREEDY, SAMPLED][(number + turn) % 2])
        for number, name in enumerate(HEADS)
        for turn, shape in enumerate((TreeShape(1, 2, 3), TreeShape(3, 1, 4), TREE))
    ],
)
def test_a_tree_ahead_continues_the_states_of_the_path_to_it(
    name: str, setups: dict[str, Setup], shape: TreeShape, sampling: SamplingParams
) -> None:
    """From round to round: of each verdict the features are here, of the tree that it calls for
    only the tokens."""
    setup, source = setups[name], random.Random(2)
    drafter = setup.drafter()
    drafter.lookahead.budget = OUTCOME_BUDGET
    sequence = draft_sequence(random_text(3, 9), sampling)
    _open(drafter, setup, sequence)
    [tree] = propose(drafter, shape, sequence)
    for _ in range(3):
        block = prepare_ahead(drafter, shape, (sequence, tree))
        assert len(block) == OUTCOME_BUDGET
        features = setup.features(sequence.token_ids)[:-1]
        for proposal in block:
            supposed = foreseen_tokens(tree, proposal)
            oracle = Behind(setup.oracle, len(supposed))
            tokens = [*sequence.token_ids, *supposed]
            expected = best_paths(oracle, tokens, features, sampling, shape)
            assert path_values(proposal.tree) == pytest.approx(expected, abs=1e-3, rel=5e-3)
        chosen = source.choice(block)
        _commit(drafter, setup, sequence, foreseen_tokens(tree, chosen))
        tree = chosen.tree
    drafter.close(sequence)
    drafter.check()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ahead_of_a_verdict_is_drafted_from_the_features_of_the_last_one(
    setup: Setup, sampling: SamplingParams
) -> None:
    """A drafter that has followed a row of verdicts prepares what a new one does that is told of
    the same tokens, features and tree."""
    source, drafter = random.Random(2), setup.drafter()
    drafter.lookahead.budget = OUTCOME_BUDGET
    sequence = draft_sequence(random_text(3, 9), sampling)
    _open(drafter, setup, sequence)
    [tree] = propose(drafter, TREE, sequence)
    for _ in range(4):
        block = prepare_ahead(drafter, TREE, (sequence, tree))
        assert len(block) == OUTCOME_BUDGET
        chosen = source.choice(block)
        _follow(drafter, setup, sequence, tree, chosen)
        tree = chosen.tree
        other = setup.drafter()
        other.lookahead.budget = OUTCOME_BUDGET
        twin = draft_sequence(sequence.token_ids, sampling)
        _open(other, setup, twin)
        propose(other, TREE, twin)
        expected = {
            each.condition: each.tree.token_ids for each in prepare_ahead(other, TREE, (twin, tree))
        }
        found = {
            each.condition: each.tree.token_ids
            for each in prepare_ahead(drafter, TREE, (sequence, tree))
        }
        # The two have seen different verdicts, so their budgets may go to different ones.
        shared = expected.keys() & found.keys()
        assert len(shared) >= 2
        assert {each: found[each] for each in shared} == {each: expected[each] for each in shared}
    drafter.check()
    drafter.close(sequence)
    drafter.check()


def test_nothing_is_drafted_ahead_without_features(setup: Setup) -> None:
    drafter = setup.drafter()
    drafter.lookahead.budget = OUTCOME_BUDGET
    sequence = draft_sequence(random_text(3, 9))
    _open(drafter, setup, sequence)
    [tree] = propose(drafter, TREE, sequence)
    sequence.token_ids.append(1)
    verdict = Verdict(1, 0, Outcome.MISSED, (), (1,), sequence.num_tokens)
    drafter.commit(sequence, verdict, None)
    assert prepare_ahead(drafter, TREE, (sequence, tree)) == []


def test_lent_pages_are_the_borrowers_alone(setup: Setup) -> None:
    drafter = setup.drafter(num_pages=81)
    shared = drafter.share_head()
    assert len(set(shared.pages)) == 70
    assert shared.max_context_tokens == 128 - CONTEXT_MARGIN
    for cache in (*shared.model.pool.keys, *shared.model.pool.values):
        cache.view(-1, PAGE_SIZE, *cache.shape[1:])[list(shared.pages)] = 7.0
    sequence = draft_sequence(random_text(0, 15))
    _open(drafter, setup, sequence)
    (tree,) = propose(drafter, TREE, sequence)
    _assert_same(tree, _oracle(setup, sequence, TREE))
    for cache in (*shared.model.pool.keys, *shared.model.pool.values):
        assert cache.view(-1, PAGE_SIZE, *cache.shape[1:])[list(shared.pages)].eq(7.0).all()
    drafter.close(sequence)
    drafter.check()
