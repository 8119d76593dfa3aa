"""A next-token layer ahead of the verdict against an oracle that recomputes every path."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from torch import Tensor

from services.draft.drafters.drafter import Proposal
from services.draft.drafters.eagle import EagleDrafter
from services.draft.sequence import DraftSequence
from shared.tokens import SamplingParams, TokenTree, TreeShape
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
from tests.helpers.head_oracle import Behind, Values, best_paths, path_values
from tests.helpers.mtp_setup import MTPS, MtpSetup, mtp_setup

HEADS = ["deepseek 1", "mimo 1"]
CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(3, 3, 9)


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MtpSetup]:
    return {name: mtp_setup(tmp_path_factory.mktemp("mtp"), MTPS[name]) for name in HEADS}


def _drafter(setup: MtpSetup) -> EagleDrafter:
    drafter = setup.drafter()
    drafter.lookahead.budget = OUTCOME_BUDGET
    return drafter


def _oracle(
    setup: MtpSetup,
    sequence: DraftSequence,
    features: Tensor,
    supposed: Sequence[int],
    shape: TreeShape,
) -> Values:
    oracle = Behind(setup.oracle, len(supposed))
    tokens = [*sequence.token_ids, *supposed]
    return best_paths(oracle, tokens, features, sequence.sampling, shape)


def _assert_same(
    setup: MtpSetup,
    sequence: DraftSequence,
    tree: TokenTree,
    block: Sequence[Proposal],
    shape: TreeShape,
) -> None:
    assert len(block) == OUTCOME_BUDGET
    features = setup.features(sequence.token_ids)[: sequence.num_tokens - 1]
    for proposal in block:
        expected = _oracle(setup, sequence, features, foreseen_tokens(tree, proposal), shape)
        assert path_values(proposal.tree) == pytest.approx(expected, abs=1e-3)


# Each head with each shape, greedy and sampled in turn: every two of the three meet.
@pytest.mark.parametrize(
    ("name", "shape", "sampling"),
    [
        pytest.param(name, shape, SAMPLED if turn % 2 else GREEDY, id=f"{name}-{shape}")
        for turn, (name, shape) in enumerate(
            itertools.product(HEADS, (CHAIN, TREE, TreeShape(1, 2, 3)))
        )
    ],
)
def test_a_tree_ahead_continues_the_states_of_the_path_to_it(
    name: str, setups: dict[str, MtpSetup], shape: TreeShape, sampling: SamplingParams
) -> None:
    setup, source = setups[name], random.Random(2)
    sequence, drafter = draft_sequence(random_text(3, 9), sampling), _drafter(setup)
    setup.open(drafter, sequence)
    [tree] = propose(drafter, shape, sequence)
    for _ in range(4):
        block = prepare_ahead(drafter, shape, (sequence, tree))
        _assert_same(setup, sequence, tree, block, shape)
        # The next trees are made with the features of this verdict.
        chosen = source.choice(block)
        setup.commit(drafter, sequence, foreseen_tokens(tree, chosen))
        tree = chosen.tree
    drafter.close(sequence)
    drafter.check()


@pytest.mark.parametrize("name", HEADS)
def test_sequences_prepare_together_and_alike(name: str, setups: dict[str, MtpSetup]) -> None:
    setup = setups[name]
    drafter = _drafter(setup)
    sequences = mixed_sequences(5, 17, 9)
    for sequence in sequences:
        setup.open(drafter, sequence)
    trees = propose(drafter, TREE, *sequences)
    block = prepare_ahead(drafter, TREE, *zip(sequences, trees, strict=True))
    for sequence, tree in zip(sequences, trees, strict=True):
        own = [each for each in block if each.sequence is sequence]
        _assert_same(setup, sequence, tree, own, TREE)


@pytest.mark.parametrize("name", HEADS)
def test_a_proposal_after_drafting_ahead_is_what_it_would_have_been(
    name: str, setups: dict[str, MtpSetup]
) -> None:
    setup = setups[name]
    sequence, drafter = draft_sequence(random_text(4, 9)), _drafter(setup)
    setup.open(drafter, sequence)
    for number in range(4):
        [tree] = propose(drafter, TREE, sequence)
        prepare_ahead(drafter, TREE, (sequence, tree))
        setup.commit(drafter, sequence, random_text(number, 2))
    [found] = propose(drafter, TREE, sequence)
    other, twin = setup.drafter(), draft_sequence(sequence.token_ids)
    setup.open(other, twin)
    [expected] = propose(other, TREE, twin)
    assert path_values(found) == pytest.approx(path_values(expected), abs=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_a_verdict_without_its_features_is_not_drafted_ahead_of(
    name: str, setups: dict[str, MtpSetup]
) -> None:
    setup = setups[name]
    sequence, drafter = draft_sequence(random_text(3, 9)), _drafter(setup)
    setup.open(drafter, sequence)
    [tree] = propose(drafter, CHAIN, sequence)
    [chosen, *_] = prepare_ahead(drafter, CHAIN, (sequence, tree))
    drafter.commit(sequence, committed(sequence, foreseen_tokens(tree, chosen)), None)
    assert prepare_ahead(drafter, CHAIN, (sequence, chosen.tree)) == []
