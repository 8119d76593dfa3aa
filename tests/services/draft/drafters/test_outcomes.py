"""What is drafted ahead for a verdict is what would be drafted after it."""

from __future__ import annotations

import random

import pytest
import torch

from services.draft.drafters import standalone
from services.draft.drafters.drafter import Proposal, VerifiedTree
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.sequence import DraftSequence, SequenceKey, drop_unknown_tokens
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import DecoderModel
from shared.tokens import Outcome, SamplingParams, TokenTree, TreeShape, Verdict
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.drafting import plain_grower

CPU = torch.device("cpu")
VOCAB_SIZE, PAGE_SIZE = 64, 4
SHAPES = [TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(2, 3, 8), TreeShape(4, 4, 16)]
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=5)]
BUDGET = 6
CONTEXT = 200
MAX_SEQUENCES = 8


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("draft")
    write_checkpoint(folder, shape=TinyShape(vocab_size=VOCAB_SIZE, max_position_embeddings=256))
    return load_decoder(folder, dtype=torch.float32, device=CPU)


class Bench:
    """One drafter with the sequences it has. Its trees are grown in passes, or level by level."""

    def __init__(
        self, decoder: Decoder, shape: TreeShape, num_pages: int = 600, *, budget: int = BUDGET
    ) -> None:
        self.pool = pool = KvPool(decoder.kv_layout(PAGE_SIZE), num_pages, CPU)
        leases = KvLeases(num_pages, PAGE_SIZE)
        grower = plain_grower(DecoderModel(decoder, pool), CONTEXT, max_sequences=MAX_SEQUENCES)
        runner = ModelRunner(decoder, pool)
        self.drafter = StandaloneDrafter(runner, leases, grower, max_context_tokens=CONTEXT)
        self.drafter.lookahead.budget = budget
        self.shape = shape
        self.outcome_budget = BUDGET

    def open(self, number: int, tokens: list[int], sampling: SamplingParams) -> DraftSequence:
        sequence = DraftSequence(
            SequenceKey(1, number), list(tokens), len(tokens), sampling, 0, True, VOCAB_SIZE, 256
        )
        self.drafter.open(sequence)
        return sequence

    def propose(self, *sequences: DraftSequence) -> list[TokenTree]:
        assert all(self.drafter.reserve(sequence, self.shape) for sequence in sequences)
        return [each.tree for each in self.drafter.propose(sequences, self.shape)]

    def begin(self, sequence: DraftSequence, tree: TokenTree) -> None:
        self.drafter.lookahead.begin(VerifiedTree(sequence, tree, self.shape, self.outcome_budget))

    def advance_all(self) -> list[Proposal]:
        proposals: list[Proposal] = []
        while self.drafter.lookahead.has_work:
            proposals += self.drafter.lookahead.advance()
        return proposals

    def commit(self, sequence: DraftSequence, tokens: tuple[int, ...]) -> None:
        sequence.token_ids.extend(tokens)
        verdict = Verdict(1, 0, Outcome.VERIFIED, (), tokens, sequence.num_tokens)
        self.drafter.commit(sequence, verdict, None)


def _text(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


def _committed(tree: TokenTree, proposal: Proposal) -> tuple[int, ...]:
    """The tokens of the verdict that a conditional proposal is for."""
    condition = proposal.condition
    assert condition is not None
    path = () if condition.node_index is None else tree.path(condition.node_index)
    return (*(tree.token_ids[node] for node in path), condition.bonus_token_id)


def _fresh(decoder: Decoder, shape: TreeShape, sequence: DraftSequence) -> TokenTree:
    """What a drafter without any state proposes."""
    bench = Bench(decoder, shape, budget=0)
    [tree] = bench.propose(bench.open(1, sequence.token_ids, sequence.sampling))
    return tree


def _fresh_after(
    decoder: Decoder, shape: TreeShape, sequence: DraftSequence, tokens: tuple[int, ...]
) -> TokenTree:
    bench = Bench(decoder, shape, budget=0)
    opened = bench.open(1, [*sequence.token_ids, *tokens], sequence.sampling)
    return bench.propose(opened)[0]


@pytest.fixture
def follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest branch is followed however unlikely it is."""
    monkeypatch.setattr(standalone, "MIN_PARENT_PROBABILITY", 1e-30)


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [(shape, sampling) for shape in SHAPES for sampling in SAMPLINGS],
)
@pytest.mark.usefixtures("follows")
def test_trees_drafted_ahead_are_those_drafted_after_the_verdict(
    decoder: Decoder, shape: TreeShape, sampling: SamplingParams
) -> None:
    source, bench = random.Random(3), Bench(decoder, shape)
    sequences = [bench.open(number, _text(number, 9 + 2 * number), sampling) for number in range(3)]
    trees = bench.propose(*sequences)
    for _ in range(4):
        for sequence, tree in zip(sequences, trees, strict=True):
            bench.begin(sequence, tree)
        proposals = bench.advance_all()
        for place, sequence in enumerate(sequences):
            own = [each for each in proposals if each.sequence is sequence]
            assert len(own) == BUDGET
            chosen = own[0] if source.random() < 0.5 else source.choice(own)
            bench.commit(sequence, _committed(trees[place], chosen))
            trees[place] = chosen.tree
            expected = _fresh(decoder, shape, sequence)
            assert (chosen.tree.token_ids, chosen.tree.parent_indices) == (
                expected.token_ids,
                expected.parent_indices,
            )
        bench.drafter.check()
    for sequence in sequences:
        bench.drafter.close(sequence)
    bench.drafter.check()


def test_likeliest_verdicts_are_prepared_for_and_none_that_the_tree_holds(
    decoder: Decoder,
) -> None:
    bench = Bench(decoder, TreeShape(3, 2, 6))
    sequence = bench.open(1, _text(1, 12), SAMPLINGS[0])
    [tree] = bench.propose(sequence)
    bench.begin(sequence, tree)
    conditions = [each.condition for each in bench.advance_all()]
    assert len(set(conditions)) == BUDGET
    children = {
        (parent, token) for parent, token in zip(tree.parent_indices, tree.token_ids, strict=True)
    }
    for condition in conditions:
        assert condition is not None
        assert (condition.node_index, condition.bonus_token_id) not in children


@pytest.mark.parametrize("num_forwards", range(6))
def test_verdict_in_the_middle_of_a_block_goes_on_from_what_is_computed(
    decoder: Decoder, num_forwards: int
) -> None:
    shape = TreeShape(3, 2, 8)
    whole, bench = (Bench(decoder, shape) for _ in range(2))
    blocks = []
    for each in (whole, bench):
        sequence = each.open(1, _text(4, 11), SAMPLINGS[1])
        [tree] = each.propose(sequence)
        each.begin(sequence, tree)
        blocks.append((sequence, tree))
    likeliest = _committed(blocks[0][1], whole.advance_all()[0])
    sequence = blocks[1][0]
    for _ in range(num_forwards):
        bench.drafter.lookahead.advance()
    bench.commit(sequence, likeliest)
    if bench.drafter.lookahead.resume(sequence):
        [answer] = bench.advance_all()
        assert answer.condition is None
        tree = answer.tree
    else:
        [tree] = bench.propose(sequence)
    expected = _fresh(decoder, shape, sequence)
    assert tree.token_ids == expected.token_ids


def test_verdict_after_one_whose_tree_is_growing(decoder: Decoder) -> None:
    """As when the target did not wait for the tree."""
    shape = TreeShape(3, 2, 8)
    bench = Bench(decoder, shape)
    sequence, other = (bench.open(n, _text(n, 11 + n), SAMPLINGS[1]) for n in range(2))
    trees = bench.propose(sequence, other)
    for each, tree in zip((sequence, other), trees, strict=True):
        bench.begin(each, tree)
    lookahead = bench.drafter.lookahead
    assert lookahead.advance() == []
    condition = next(iter(lookahead._passes.under_way.branches)).request
    bench.commit(sequence, condition.path)
    assert lookahead.resume(sequence)
    bench.drafter.check()
    bench.commit(sequence, (7, 9))
    assert not lookahead.resume(sequence)
    assert {each.sequence for each in bench.advance_all()} == {other}
    [tree] = bench.propose(sequence)
    assert tree.token_ids == _fresh(decoder, shape, sequence).token_ids
    for each in (sequence, other):
        bench.drafter.close(each)
    bench.drafter.check()
    assert bench.drafter.gauges()["held_page_count"] == 0


def test_pass_that_nobody_waits_for_is_given_up(decoder: Decoder) -> None:
    shape = TreeShape(3, 1, 4)
    bench = Bench(decoder, shape)
    sequence = bench.open(1, _text(4, 11), SAMPLINGS[0])
    [tree] = bench.propose(sequence)
    bench.begin(sequence, tree)
    assert bench.drafter.lookahead.advance() == []
    bench.drafter.close(sequence)
    assert bench.drafter.lookahead.advance() == []
    assert not bench.drafter.lookahead.has_work
    assert bench.drafter.gauges()["held_page_count"] == 0


@pytest.mark.parametrize("is_adopted", [False, True])
def test_pass_never_writes_to_pages_that_others_have_by_now(
    decoder: Decoder, is_adopted: bool
) -> None:
    """A sequence ends between a pass's trees and their leaves, and another one gets its pages."""
    shape = TreeShape(3, 2, 8)
    bench = Bench(decoder, shape)
    sequence, other = (bench.open(n, _text(n, 11 + n), SAMPLINGS[1]) for n in range(2))
    trees = bench.propose(sequence, other)
    for each, tree in zip((sequence, other), trees, strict=True):
        bench.begin(each, tree)
    prepared: list[Proposal] = []
    while not prepared:
        prepared = bench.drafter.lookahead.advance()
    assert {each.sequence for each in prepared} == {sequence, other}
    if is_adopted:
        own = next(each for each in prepared if each.sequence is sequence)
        bench.commit(sequence, _committed(trees[0], own))
    bench.drafter.close(sequence)
    newcomer = bench.open(2, _text(9, 150), SAMPLINGS[0])
    [tree] = bench.propose(newcomer)
    pages = bench.drafter._contexts.kv_of(newcomer).lease.pages
    slots = [page * PAGE_SIZE + offset for page in pages for offset in range(PAGE_SIZE)]
    before = bench.pool.storage[:, :, slots].clone()
    bench.advance_all()
    assert torch.equal(bench.pool.storage[:, :, slots], before)
    bench.commit(newcomer, (5,))
    assert bench.propose(newcomer)[0].token_ids == _fresh(decoder, shape, newcomer).token_ids
    for each in (other, newcomer):
        bench.drafter.close(each)
    bench.advance_all()
    bench.drafter.check()
    assert bench.drafter.gauges()["held_page_count"] == 0


def test_short_memory_ends_drafting_ahead_but_not_drafting(
    decoder: Decoder,
) -> None:
    shape = TreeShape(3, 2, 8)
    bench = Bench(decoder, shape, num_pages=6)
    sequence = bench.open(1, _text(4, 11), SAMPLINGS[0])
    [tree] = bench.propose(sequence)
    bench.begin(sequence, tree)
    assert bench.advance_all() == []
    bench.commit(sequence, (1,))
    assert bench.propose(sequence)[0].token_ids
    bench.drafter.close(sequence)
    bench.drafter.check()


@pytest.mark.usefixtures("follows")
def test_trees_behind_the_likeliest_branch_are_there_when_its_verdict_falls(
    decoder: Decoder,
) -> None:
    shape = TreeShape(3, 2, 8)
    bench = Bench(decoder, shape)
    sequence = bench.open(1, _text(4, 30), SAMPLINGS[1])
    [tree] = bench.propose(sequence)
    bench.begin(sequence, tree)
    likeliest = bench.advance_all()[0]
    for _ in range(4):
        bench.commit(sequence, _committed(tree, likeliest))
        tree = likeliest.tree
        assert tree.token_ids == _fresh(decoder, shape, sequence).token_ids
        bench.begin(sequence, tree)
        prepared = bench.drafter.lookahead.advance()
        assert len(prepared) == BUDGET, "it takes no forward"
        likeliest = prepared[0]
        assert bench.advance_all() == [], "they are for the verdict after the next"
        bench.drafter.check()
    bench.drafter.close(sequence)
    bench.drafter.check()
    assert bench.drafter.gauges()["held_page_count"] == 0


@pytest.mark.usefixtures("follows")
@pytest.mark.parametrize("num_forwards", range(1, 14))
def test_verdict_while_the_likeliest_branch_is_followed(
    decoder: Decoder, num_forwards: int
) -> None:
    """Whether it is that of the branch or another, and however far what follows it has come."""
    shape = TreeShape(3, 2, 8)
    for place in (0, 3):
        bench = Bench(decoder, shape)
        sequence = bench.open(1, _text(4, 30), SAMPLINGS[0])
        [tree] = bench.propose(sequence)
        bench.begin(sequence, tree)
        found: list[Proposal] = []
        for _ in range(num_forwards):
            found += bench.drafter.lookahead.advance()
        if not found:
            continue
        bench.commit(sequence, _committed(tree, found[place]))
        bench.begin(sequence, found[place].tree)
        prepared = bench.advance_all()
        assert len(prepared) == BUDGET
        bench.commit(sequence, _committed(found[place].tree, prepared[1]))
        assert prepared[1].tree.token_ids == _fresh(decoder, shape, sequence).token_ids
        bench.drafter.check()
        bench.drafter.close(sequence)
        while bench.drafter.lookahead.has_work:
            bench.drafter.lookahead.advance()
        assert bench.drafter.gauges()["held_page_count"] == 0


def test_branches_make_room_for_the_trees_of_current_rounds(decoder: Decoder) -> None:
    shape = TreeShape(3, 2, 8)
    bench = Bench(decoder, shape, num_pages=22)
    first = bench.open(1, _text(4, 11), SAMPLINGS[0])
    [tree] = bench.propose(first)
    bench.begin(first, tree)
    prepared = bench.advance_all()
    assert prepared
    second = bench.open(2, _text(5, 40), SAMPLINGS[0])
    assert bench.propose(second)[0].token_ids == _fresh(decoder, shape, second).token_ids
    bench.drafter.check()
    # The branch of what falls is gone, so that its tree follows the verdict.
    bench.commit(first, _committed(tree, prepared[0]))
    bench.drafter.close(second)
    assert bench.propose(first)[0].token_ids == _fresh(decoder, shape, first).token_ids
    bench.drafter.close(first)
    bench.drafter.check()


def test_pass_under_way_makes_room_for_the_trees_of_current_rounds(decoder: Decoder) -> None:
    """Its verdicts did not fall, so nobody needs its pages."""
    shape = TreeShape(3, 2, 8)
    bench = Bench(decoder, shape, num_pages=24)
    sequence = bench.open(1, _text(4, 30), SAMPLINGS[0])
    [tree] = bench.propose(sequence)
    bench.begin(sequence, tree)
    assert bench.drafter.lookahead.advance() == []
    accepted = tuple(tree.token_ids[node] for node in tree.path(len(tree) - 1))
    bench.commit(sequence, (*accepted, *_text(8, 20)))
    assert bench.propose(sequence)[0].token_ids == _fresh(decoder, shape, sequence).token_ids
    bench.advance_all()
    bench.drafter.close(sequence)
    bench.drafter.check()
    assert bench.drafter.gauges()["held_page_count"] == 0


@pytest.mark.usefixtures("follows")
def test_verdicts_behind_a_tree_name_its_nodes_as_the_target_has_them(decoder: Decoder) -> None:
    """Tokens that the target does not know are no nodes there."""
    shape = TreeShape(3, 3, 12)
    bench, num_shorter = Bench(decoder, shape), 0
    for number in range(12):
        sequence = bench.open(number, _text(number, 30), SAMPLINGS[1])
        sequence.vocab_size = VOCAB_SIZE // 2
        tree = drop_unknown_tokens(bench.propose(sequence)[0], sequence.vocab_size)
        bench.begin(sequence, tree)
        prepared = [each for each in bench.advance_all() if each.condition is not None]
        known = [each for each in prepared if each.condition.bonus_token_id < sequence.vocab_size]
        for each in known[:1]:
            bench.commit(sequence, _committed(tree, each))
            verified = drop_unknown_tokens(each.tree, sequence.vocab_size)
            bench.begin(sequence, verified)
            for follower in bench.drafter.lookahead.advance():
                tokens = _committed(verified, follower)
                num_shorter += verified != each.tree
                expected = _fresh_after(decoder, shape, sequence, tokens)
                assert follower.tree.token_ids == expected.token_ids
        bench.drafter.close(sequence)
    assert num_shorter > 0


@pytest.mark.usefixtures("follows")
def test_branch_whose_window_slides_starts_over(decoder: Decoder) -> None:
    shape = TreeShape(3, 1, 4)
    bench = Bench(decoder, shape)
    sequence = bench.open(1, _text(4, 150), SAMPLINGS[0])
    [tree] = bench.propose(sequence)
    num_slides = 0
    for _ in range(20):
        bench.begin(sequence, tree)
        prepared = bench.advance_all()
        if prepared:
            bench.commit(sequence, _committed(tree, prepared[0]))
            tree = prepared[0].tree
        else:
            bench.commit(sequence, (1,))
            [tree] = bench.propose(sequence)
            num_slides += 1
        bench.drafter.check()
    assert num_slides > 0
    bench.drafter.close(sequence)
    bench.drafter.check()


def test_graphs_of_passes_that_can_stop_are_made_where_verdicts_are_prepared_for(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere nothing would use them, and no memory is set aside for them."""
    asked: list[bool] = []

    def capture_next(grower: TreeGrower, tree: TreeShape, **_: object) -> bool:
        asked.append(grower._is_split)
        return False

    monkeypatch.setattr(TreeGrower, "capture_next", capture_next)
    bench = Bench(decoder, TreeShape(3, 2, 8))
    assert not bench.drafter.prepare(bench.shape, None)
    bench.drafter.lookahead.budget = 0
    assert not bench.drafter.prepare(bench.shape, None)
    assert asked == [False, True, False]


def test_a_window_slides_where_drafting_ahead_ends_before_its_tree_has_grown(
    decoder: Decoder,
) -> None:
    shape = TreeShape(3, 2, 8)
    bench = Bench(decoder, shape)
    sequence = bench.open(1, _text(4, CONTEXT - 33), SAMPLINGS[0])
    [tree] = bench.propose(sequence)
    bench.begin(sequence, tree)
    lookahead = bench.drafter.lookahead
    assert lookahead.advance() == []
    bench.commit(sequence, lookahead._passes.under_way.branches[0].request.path)
    assert lookahead.resume(sequence)
    lookahead.budget = 0
    assert not lookahead.resume(sequence)
    assert bench.drafter.backlog(sequence) > 1, "the window has slid"
    assert bench.drafter.reserve(sequence, shape)
    bench.drafter.catch_up([sequence], CONTEXT)
    assert bench.propose(sequence)[0].token_ids == _fresh(decoder, shape, sequence).token_ids
    bench.advance_all()
    bench.drafter.close(sequence)
    bench.drafter.check()
    assert bench.drafter.gauges()["held_page_count"] == 0
