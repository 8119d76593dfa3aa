"""Heads that draft ahead: what becomes of passes, pages and verdicts. The trees: `test_eagle`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from services.draft.drafters import branch_drafter
from services.draft.drafters.branch_drafter import BranchPass
from services.draft.drafters.contexts import CONTEXT_MARGIN
from services.draft.drafters.drafter import Proposal, VerifiedTree
from services.draft.likely_verdicts import LikelyVerdict, likely_verdicts
from services.draft.sequence import DraftSequence
from shared.models.heads.head import DraftHead
from shared.tokens import Condition, TokenTree, TreeShape
from tests.helpers.drafting import (
    GREEDY,
    OUTCOME_BUDGET,
    draft_sequence,
    foreseen_tokens,
    mixed_sequences,
    prepare_ahead,
    propose,
)
from tests.helpers.head_oracle import Values, path_values
from tests.helpers.twin_drafters import (
    CONTEXT,
    HEADS,
    SAMPLED,
    SAMPLINGS,
    TwinDrafters,
    load_heads,
    text,
)

TREE = TreeShape(3, 3, 9)
SHAPES = [TreeShape(1, 1, 2), TreeShape(4, 1, 5), TreeShape(1, 5, 4), TREE, TreeShape(5, 4, 14)]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DraftHead]:
    return load_heads(tmp_path_factory, torch.device("cpu"))


@pytest.fixture
def twins(heads: dict[str, DraftHead]) -> TwinDrafters:
    return _ahead(heads["eagle3"])


def _ahead(head: DraftHead) -> TwinDrafters:
    twins = TwinDrafters.of_head(head)
    twins.whole.lookahead.budget = OUTCOME_BUDGET
    return twins


def _opened(twins: TwinDrafters, length: int = 21, number: int = 3) -> DraftSequence:
    tokens = text(random.Random(number), length)
    sequence = draft_sequence(tokens, SAMPLINGS[number % 2], number)
    twins.open(sequence)
    twins.send_all(sequence)
    return sequence


def _values(
    sequence: DraftSequence, proposals: Sequence[Proposal]
) -> dict[Condition | None, Values]:
    return {
        each.condition: path_values(each.tree) for each in proposals if each.sequence is sequence
    }


def _prepared(
    twins: TwinDrafters, shape: TreeShape, *verified: tuple[DraftSequence, TokenTree]
) -> list[Proposal]:
    """Returns what is prepared, for each sequence as much as it may."""
    found = prepare_ahead(twins.whole, shape, *verified)
    for sequence, _ in verified:
        assert len(_values(sequence, found)) == OUTCOME_BUDGET
    return found


def _under_way(twins: TwinDrafters) -> BranchPass:
    under_way: BranchPass = twins.whole.lookahead._passes.under_way
    return under_way


def _held_pages(twins: TwinDrafters) -> float:
    twins.whole.check()
    return twins.whole.gauges()["held_page_count"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # Each head with every other shape, each shape with every other head.
        (name, shape)
        for number, name in enumerate(HEADS)
        for shape in SHAPES[number % 2 :: 2]
    ],
)
def test_sequences_beyond_a_pass_are_prepared_for_from_round_to_round(
    heads: dict[str, DraftHead], name: str, shape: TreeShape
) -> None:
    draw, twins = random.Random(f"{name} {shape}"), _ahead(heads[name])
    # More sequences than one pass takes.
    batch = mixed_sequences(2, 9, 13, 30)
    twins.open(*batch)
    twins.send_all(*batch)
    trees = twins.trees(shape, *batch)
    for _ in range(3):
        prepared = _prepared(twins, shape, *zip(batch, trees, strict=True))
        for place, sequence in enumerate(batch):
            fallen = draw.choice([each for each in prepared if each.sequence is sequence])
            twins.commit(sequence, foreseen_tokens(trees[place], fallen), is_late=False)
            trees[place] = fallen.tree
    for sequence in batch:
        twins.close(sequence)
    assert _held_pages(twins) == 0


def test_trees_of_other_shapes_are_walked(twins: TwinDrafters) -> None:
    """The target may request another shape in any round, and its vocabulary may be smaller."""
    draw, sequence = random.Random(2), _opened(twins)
    [tree] = twins.trees(TREE, sequence)
    for number in range(6):
        shape = SHAPES[number % len(SHAPES)]
        fallen = draw.choice(_prepared(twins, shape, (sequence, tree)))
        twins.commit(sequence, foreseen_tokens(tree, fallen), is_late=False)
        tree = fallen.tree.only(range(1 + len(fallen.tree) // 2))


def test_a_tree_whose_shape_nobody_has_prepared_for_is_not_walked(
    twins: TwinDrafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capturing its graph would hold up every sequence's trees."""
    draw, sequence = random.Random(6), _opened(twins)
    [tree] = twins.trees(TREE, sequence)
    for shape, is_walked in ((TREE, True), (TreeShape(1, 1, 2), False)):
        fallen = draw.choice(_prepared(twins, TREE, (sequence, tree)))
        twins.commit(sequence, foreseen_tokens(tree, fallen), is_late=False)
        tree = fallen.tree
        with monkeypatch.context() as patch:
            patch.setattr(twins.grower, "is_ready", lambda *_, **__: False)
            assert bool(prepare_ahead(twins.whole, shape, (sequence, tree))) == is_walked
    # The tree of the next round is grown from its features.
    twins.commit(sequence, text(draw, 2), is_late=False)
    twins.trees(TREE, sequence)
    twins.close(sequence)
    assert _held_pages(twins) == 0


def test_a_miss_is_followed_by_a_tree_from_its_features(twins: TwinDrafters) -> None:
    draw, sequence = random.Random(4), _opened(twins)
    for _ in range(4):
        [tree] = twins.trees(TREE, sequence)
        _prepared(twins, TREE, (sequence, tree))
        twins.commit(sequence, text(draw, 2), is_late=False)
    twins.close(sequence)
    assert _held_pages(twins) == 0


@pytest.mark.parametrize("num_forwards", [0, 1, 2])
def test_a_verdict_falls_while_its_tree_grows(
    heads: dict[str, DraftHead], twins: TwinDrafters, num_forwards: int
) -> None:
    """It gets the tree if that is nearly there, else one from its features."""
    sequence = _opened(twins)
    [tree] = twins.trees(TREE, sequence)
    others = _ahead(heads["eagle3"])
    _opened(others)
    others.trees(TREE, sequence)
    expected = _values(sequence, _prepared(others, TREE, (sequence, tree)))
    lookahead = twins.whole.lookahead
    lookahead.begin(VerifiedTree(sequence, tree, TREE, OUTCOME_BUDGET))
    for _ in range(max(num_forwards, 1)):
        assert lookahead.advance() == []
    request = _under_way(twins).branches[0].request
    twins.commit(sequence, request.path, is_late=False)
    is_late = num_forwards == 2
    assert lookahead.resume(sequence) == is_late
    proposals: list[Proposal] = []
    while lookahead.has_work:
        proposals += lookahead.advance()
    if is_late:
        [late] = proposals
        assert late.condition is None
        assert path_values(late.tree) == pytest.approx(
            expected[request.verdict.condition], abs=1e-3
        )
        # What comes next goes on from the features all the same.
        _prepared(twins, TREE, (sequence, late.tree))
    else:
        assert proposals == []
        twins.trees(TREE, sequence)
    twins.close(sequence)
    assert _held_pages(twins) == 0


def test_a_verdict_after_one_whose_tree_is_growing(twins: TwinDrafters) -> None:
    """As when the target did not wait for the tree."""
    sequence, other = _opened(twins), _opened(twins, 9, 4)
    trees = twins.trees(TREE, sequence, other)
    lookahead = twins.whole.lookahead
    for each, tree in zip((sequence, other), trees, strict=True):
        lookahead.begin(VerifiedTree(each, tree, TREE, OUTCOME_BUDGET))
    for _ in range(2):
        assert lookahead.advance() == []
    twins.commit(sequence, _under_way(twins).branches[0].request.path, is_late=False)
    assert lookahead.resume(sequence)
    twins.commit(sequence, (7, 9), is_late=False)
    assert not lookahead.resume(sequence)
    while lookahead.has_work:
        assert all(each.sequence is other for each in lookahead.advance())
    twins.trees(TREE, sequence)
    for each in (sequence, other):
        twins.close(each)
    assert _held_pages(twins) == 0


def test_nobody_resumes_where_drafting_ahead_ends(twins: TwinDrafters) -> None:
    sequence = _opened(twins)
    [tree] = twins.trees(TREE, sequence)
    lookahead = twins.whole.lookahead
    lookahead.begin(VerifiedTree(sequence, tree, TREE, OUTCOME_BUDGET))
    for _ in range(2):
        assert lookahead.advance() == []
    twins.commit(sequence, _under_way(twins).branches[0].request.path, is_late=False)
    lookahead.budget = 0
    assert not lookahead.resume(sequence)
    twins.trees(TREE, sequence)
    while lookahead.has_work:
        assert lookahead.advance() == []
    twins.close(sequence)
    assert _held_pages(twins) == 0


@pytest.mark.parametrize("num_forwards", range(6))
def test_a_sequence_ends_in_the_middle_of_a_pass(twins: TwinDrafters, num_forwards: int) -> None:
    sequence, other = _opened(twins), _opened(twins, 9, 4)
    trees = twins.trees(TREE, sequence, other)
    lookahead = twins.whole.lookahead
    for each, tree in zip((sequence, other), trees, strict=True):
        lookahead.begin(VerifiedTree(each, tree, TREE, OUTCOME_BUDGET))
    for _ in range(num_forwards):
        lookahead.advance()
    twins.close(sequence)
    proposals: list[Proposal] = []
    while lookahead.has_work:
        proposals += lookahead.advance()
        twins.whole.check()
    assert all(each.sequence is other for each in proposals)
    twins.close(other)
    assert _held_pages(twins) == 0


def test_a_verdict_without_its_features_is_not_drafted_ahead_of(twins: TwinDrafters) -> None:
    sequence = _opened(twins)
    [tree] = twins.trees(TREE, sequence)
    [chosen, *_] = _prepared(twins, TREE, (sequence, tree))
    num_tokens = sequence.num_tokens
    twins.commit(sequence, foreseen_tokens(tree, chosen), is_late=True)
    assert prepare_ahead(twins.whole, TREE, (sequence, chosen.tree)) == []
    twins.send(sequence, num_tokens - 1, sequence.num_tokens - 1)
    twins.trees(TREE, sequence)


def test_a_gap_in_the_features_ends_what_is_prepared(twins: TwinDrafters) -> None:
    sequence = _opened(twins)
    [tree] = twins.trees(TREE, sequence)
    lookahead = twins.whole.lookahead
    lookahead.begin(VerifiedTree(sequence, tree, TREE, OUTCOME_BUDGET))
    assert lookahead.advance() == []
    twins.commit(sequence, text(random.Random(1), 6), is_late=True)
    twins.send(sequence, sequence.num_tokens - 4, sequence.num_tokens - 1)
    assert lookahead.advance() == []
    assert not lookahead.has_work
    [tree] = twins.trees(TREE, sequence)
    _prepared(twins, TREE, (sequence, tree))


def test_windows_slide_under_trees_prepared_ahead(twins: TwinDrafters) -> None:
    draw, sequence = random.Random(5), _opened(twins, 40)
    [tree] = twins.trees(TREE, sequence)
    while sequence.num_tokens < CONTEXT + 60:
        prepared = prepare_ahead(twins.whole, TREE, (sequence, tree))
        if prepared and draw.random() < 0.8:
            fallen = draw.choice(prepared)
            twins.commit(sequence, foreseen_tokens(tree, fallen), is_late=False)
            tree = fallen.tree
        else:
            twins.commit(sequence, text(draw, 3), is_late=False)
            [tree] = twins.trees(TREE, sequence)
    twins.close(sequence)
    assert _held_pages(twins) == 0


def test_a_window_that_slides_leaves_no_tree_growing_behind_the_old_one(
    twins: TwinDrafters,
) -> None:
    sequence = _opened(twins, CONTEXT - CONTEXT_MARGIN + 1)
    [tree] = twins.trees(TREE, sequence)
    lookahead = twins.whole.lookahead
    lookahead.begin(VerifiedTree(sequence, tree, TREE, OUTCOME_BUDGET))
    for _ in range(2):
        assert lookahead.advance() == []
    twins.commit(sequence, _under_way(twins).branches[0].request.path, is_late=False)
    assert not lookahead.resume(sequence)
    assert lookahead.advance() == []
    twins.trees(TREE, sequence)
    twins.close(sequence)
    assert _held_pages(twins) == 0


def test_a_verdict_that_fills_the_context_gets_no_branch(
    twins: TwinDrafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed behind the leaves of a tree of one level, but its root is."""
    sequence = _opened(twins, CONTEXT - CONTEXT_MARGIN + 1)
    [tree] = propose(twins.whole, TreeShape(CONTEXT_MARGIN - 1, 1, CONTEXT_MARGIN), sequence)
    lookahead = twins.whole.lookahead
    chosen: list[LikelyVerdict] = []

    def at_the_end(*arguments: Any) -> list[LikelyVerdict]:
        verdicts = likely_verdicts(*arguments[:-1], 10_000)
        chosen[:] = [each for each in verdicts if each.tree_row == len(tree)]
        return chosen

    monkeypatch.setattr(branch_drafter, "likely_verdicts", at_the_end)
    lookahead.begin(VerifiedTree(sequence, tree, TreeShape(1, 1, 2), OUTCOME_BUDGET))
    proposals: list[Proposal] = []
    while lookahead.has_work:
        proposals += lookahead.advance()
    assert chosen
    assert proposals == []
    twins.close(sequence)
    assert _held_pages(twins) == 0


def test_branches_make_room_for_the_trees_of_current_rounds(heads: dict[str, DraftHead]) -> None:
    twins = TwinDrafters.of_head(heads["eagle3"], num_pages=26)
    twins.whole.lookahead.budget = OUTCOME_BUDGET
    sequence = _opened(twins)
    [tree] = propose(twins.whole, TREE, sequence)
    twins.whole.lookahead.begin(VerifiedTree(sequence, tree, TREE, OUTCOME_BUDGET))
    assert twins.whole.lookahead.advance() == []
    assert _under_way(twins).branches
    newcomer = draft_sequence(text(random.Random(9), 41), GREEDY, 9)
    twins.open(newcomer)
    twins.send_all(newcomer)
    [found], [expected] = (
        propose(drafter, TREE, newcomer) for drafter in (twins.whole, twins.scored)
    )
    assert path_values(found) == pytest.approx(path_values(expected), abs=1e-3)
    assert _under_way(twins) is None
    for each in (sequence, newcomer):
        twins.close(each)
    assert _held_pages(twins) == 0


def test_requests_that_passes_do_not_take_are_drafted_for_after_their_verdicts(
    twins: TwinDrafters,
) -> None:
    batch = [_opened(twins, 9, 2), _opened(twins, 12, 3)]
    batch[1].mirrors_noise = False
    assert batch[1].sampling == SAMPLED
    trees = twins.trees(TREE, *batch)
    assert twins.grower.num_sequences == 1
    found = prepare_ahead(twins.whole, TREE, *zip(batch, trees, strict=True))
    assert {each.sequence for each in found} == {batch[0]}
    for sequence, tree in zip(batch, trees, strict=True):
        twins.commit(sequence, tree.token_ids[:1], is_late=False)
    twins.trees(TREE, *batch)
