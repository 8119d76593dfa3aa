"""Which rule decides which tree, and what may be known of a drawn chain beforehand."""

from __future__ import annotations

import pytest
import torch

from services.target.verifier import RejectionRule
from shared.speculation.rejection import BLOCK, REJECTION, ChainRule, DrawnChain
from shared.tokens import EMPTY_TREE, TokenTree

VOCAB_SIZE = 6


def _point(*tokens: int) -> torch.Tensor:
    """Distributions that have one token each."""
    distributions = torch.full((len(tokens), VOCAB_SIZE), -torch.inf)
    distributions[torch.arange(len(tokens)), list(tokens)] = 0.0
    return distributions


@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
def test_trees_of_both_kinds_are_decided_in_one_step(rule: ChainRule) -> None:
    """Distributions are points, so there is one right answer for each."""
    source = torch.Generator().manual_seed(0)
    drawn = DrawnChain.of((1, 2), torch.zeros(2, VOCAB_SIZE).log_softmax(-1))
    branched = TokenTree((4, 3, 5), (None, None, 1))
    trees = [branched, drawn, EMPTY_TREE, drawn.only(())]
    distributions = torch.cat((_point(3, 0, 5, 2), _point(1, 2, 4), _point(0), _point(5)))
    paths = RejectionRule(source, rule)(distributions, trees)
    assert [path.node_indices for path in paths] == [(1, 2), (0, 1), (), ()]
    assert [path.bonus_token_id for path in paths] == [2, 4, 0, 5]


def test_a_chain_without_distributions_is_a_point_mass() -> None:
    """Accepted as often as the target draws its token, however sure the draft was."""
    source = torch.Generator().manual_seed(0)
    distribution = torch.tensor([0.3, 0.1, 0.1, 0.2, 0.2, 0.1]).log().expand(2, -1)
    rule, tree = RejectionRule(source, REJECTION), TokenTree((0,), (None,), (0.0,))
    [*paths] = rule(distribution.repeat(4000, 1), [tree] * 4000)
    assert 1100 < sum(len(path.node_indices) for path in paths) < 1300
