"""Blocks ahead of the verdict against an oracle that recomputes each from scratch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.draft.drafters import dflash
from services.draft.drafters.dflash import DflashDrafter
from services.draft.drafters.drafter import Proposal, VerifiedTree
from services.draft.sequence import DraftSequence
from shared.tokens import SamplingParams, TokenTree, TreeShape
from tests.helpers.block_setup import BLOCK_SIZE, CHAIN, TREE, BlockSetup, block_setup
from tests.helpers.dflash_heads import best_block_paths
from tests.helpers.drafting import (
    GREEDY,
    OUTCOME_BUDGET,
    SAMPLED,
    committed,
    draft_sequence,
    foreseen_tokens,
    mixed_sequences,
    prepare_ahead,
    propose,
    random_text,
)
from tests.helpers.head_oracle import Values, path_values

SHORT = TreeShape(2, 2, 6)
# More than there are verdicts to choose among.
ALL = 10_000
PENALISED = SamplingParams(temperature=0.0, frequency_penalty=1.5)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> BlockSetup:
    return block_setup(tmp_path_factory.mktemp("heads"))


def _drafter(setup: BlockSetup, *, num_pages: int = 100, window: int = 120) -> DflashDrafter:
    drafter = setup.drafter(num_pages=num_pages, window=window)
    drafter.lookahead.budget = OUTCOME_BUDGET
    return drafter


def _oracle(
    setup: BlockSetup, sequence: DraftSequence, supposed: Sequence[int], shape: TreeShape
) -> Values:
    """Returns the best paths of a block that knows the features before `sequence`'s last token,
    and the supposed tokens behind it."""
    tokens = [*sequence.token_ids, *supposed]
    logits = setup.oracle.block_logits(
        tokens,
        setup.features(tokens)[: sequence.num_tokens - 1],
        num_supposed=len(supposed),
    )
    return best_block_paths(logits, sequence.sampling, shape, num_tokens=len(tokens))


def _assert_same(
    setup: BlockSetup,
    sequence: DraftSequence,
    tree: TokenTree,
    block: Sequence[Proposal],
    shape: TreeShape,
) -> None:
    assert block
    for proposal in block:
        expected = _oracle(setup, sequence, foreseen_tokens(tree, proposal), shape)
        assert path_values(proposal.tree) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [CHAIN, TREE, SHORT], ids=str)
def test_a_block_ahead_sees_the_features_before_the_tree_and_the_tokens_of_its_verdict(
    setup: BlockSetup, shape: TreeShape, sampling: SamplingParams
) -> None:
    sequence, drafter = draft_sequence(random_text(3, 9), sampling), _drafter(setup)
    setup.open(drafter, sequence)
    [tree] = propose(drafter, shape, sequence)
    for _ in range(4):
        block = prepare_ahead(drafter, shape, (sequence, tree))
        assert len(block) == OUTCOME_BUDGET
        assert len({each.condition for each in block}) == len(block)
        _assert_same(setup, sequence, tree, block, shape)
        # The next blocks are made with the features of this verdict.
        chosen = block[-1]
        setup.commit(drafter, sequence, foreseen_tokens(tree, chosen))
        tree = chosen.tree
    drafter.close(sequence)
    drafter.check()


def test_no_block_is_for_a_token_that_the_tree_holds(setup: BlockSetup) -> None:
    sequence, drafter = draft_sequence(random_text(3, 9)), _drafter(setup)
    setup.open(drafter, sequence)
    [tree] = propose(drafter, TREE, sequence)
    for proposal in prepare_ahead(drafter, TREE, (sequence, tree)):
        assert proposal.condition is not None
        siblings = [
            token
            for token, parent in zip(tree.token_ids, tree.parent_indices, strict=True)
            if parent == proposal.condition.node_index
        ]
        assert proposal.condition.bonus_token_id not in siblings


@pytest.mark.parametrize("num_steps", [2, BLOCK_SIZE - 1])
def test_a_whole_block_is_foreseen_where_the_token_behind_it_was_scored(
    setup: BlockSetup, num_steps: int
) -> None:
    shape = TreeShape(num_steps, 1, num_steps + 1)
    sequence, drafter = draft_sequence(random_text(3, 9)), _drafter(setup)
    setup.open(drafter, sequence)
    [tree] = propose(drafter, shape, sequence)
    drafter.lookahead.begin(VerifiedTree(sequence, tree, shape, ALL))
    block = drafter.lookahead.advance()
    depths = {len(foreseen_tokens(tree, each)) - 1 for each in block}
    assert (num_steps in depths) == (num_steps < BLOCK_SIZE - 1)


def test_sequences_prepare_together_and_alike(
    setup: BlockSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {}
    for max_rows in (1, dflash.MAX_ROWS):
        monkeypatch.setattr(dflash, "MAX_ROWS", max_rows)
        drafter = _drafter(setup)
        sequences = mixed_sequences(5, 17, 9)
        for sequence in sequences:
            setup.open(drafter, sequence)
        trees = propose(drafter, TREE, *sequences)
        block = prepare_ahead(drafter, TREE, *zip(sequences, trees, strict=True))
        for sequence, tree in zip(sequences, trees, strict=True):
            own = [each for each in block if each.sequence is sequence]
            assert len(own) == OUTCOME_BUDGET
            _assert_same(setup, sequence, tree, own, TREE)
        shapes[max_rows] = [(each.condition, each.tree.token_ids) for each in block]
    assert len(set(map(tuple, shapes.values()))) == 1


def test_penalties_count_the_tokens_of_the_verdict(setup: BlockSetup) -> None:
    sequence, drafter = draft_sequence(random_text(9, 15), PENALISED), _drafter(setup)
    sequence.num_prompt_tokens = 2
    setup.open(drafter, sequence)
    [tree] = propose(drafter, CHAIN, sequence)
    block = prepare_ahead(drafter, CHAIN, (sequence, tree))
    for proposal in block:
        supposed = foreseen_tokens(tree, proposal)
        tokens = [*sequence.token_ids, *supposed]
        logits = setup.oracle.block_logits(
            tokens, setup.features(tokens)[:14], num_supposed=len(supposed)
        )
        for token in tokens[2:]:
            logits[:, token] -= 1.5
        assert list(proposal.tree.token_ids) == logits.argmax(1).tolist()


def test_a_verdict_without_its_features_is_not_drafted_ahead_of(setup: BlockSetup) -> None:
    sequence, drafter = draft_sequence(random_text(3, 9)), _drafter(setup)
    setup.open(drafter, sequence)
    [tree] = propose(drafter, CHAIN, sequence)
    [chosen, *_] = prepare_ahead(drafter, CHAIN, (sequence, tree))
    drafter.commit(sequence, committed(sequence, foreseen_tokens(tree, chosen)), None)
    assert prepare_ahead(drafter, CHAIN, (sequence, chosen.tree)) == []


def test_a_verdict_that_was_not_foreseen_leaves_nothing_behind(setup: BlockSetup) -> None:
    sequence, drafter = draft_sequence(random_text(3, 9)), _drafter(setup)
    setup.open(drafter, sequence)
    [tree] = propose(drafter, CHAIN, sequence)
    prepare_ahead(drafter, CHAIN, (sequence, tree))
    setup.commit(drafter, sequence, (tree.token_ids[0], tree.token_ids[1] ^ 1))
    assert prepare_ahead(drafter, CHAIN, (sequence, tree)) == []
    [tree] = propose(drafter, CHAIN, sequence)
    _assert_same(setup, sequence, tree, prepare_ahead(drafter, CHAIN, (sequence, tree)), CHAIN)


@pytest.mark.parametrize("num_pages", range(4, 12))
def test_as_many_verdicts_as_there_is_memory_for(setup: BlockSetup, num_pages: int) -> None:
    sequence, drafter = draft_sequence(random_text(3, 8)), _drafter(setup, num_pages=num_pages)
    setup.open(drafter, sequence)
    [tree] = propose(drafter, CHAIN, sequence)
    block = prepare_ahead(drafter, CHAIN, (sequence, tree))
    # Seven positions and a block take three pages; five verdicts and the way to them, six more.
    assert bool(block) == (num_pages > 4)
    assert (len(block) == OUTCOME_BUDGET) == (num_pages > 9)
    if block:
        _assert_same(setup, sequence, tree, block, CHAIN)
    drafter.close(sequence)
    assert drafter.gauges()["free_page_count"] == num_pages - 1


def test_a_window_that_slides_keeps_blocks_ahead(setup: BlockSetup) -> None:
    sequence, drafter = draft_sequence(random_text(4, 9)), _drafter(setup, window=8)
    setup.open(drafter, sequence)
    [tree] = propose(drafter, CHAIN, sequence)
    for _ in range(8):
        block = prepare_ahead(drafter, CHAIN, (sequence, tree))
        assert len(block) == OUTCOME_BUDGET
        setup.commit(drafter, sequence, foreseen_tokens(tree, block[0]))
        tree = block[0].tree
    drafter.check()
