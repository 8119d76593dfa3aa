"""Trees are cut to the nodes that their draft believes in most, and to nothing else."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from services.target.scheduler import narrowed
from shared.speculation.rejection import DrawnChain
from shared.tokens import TokenTree

#          0        1
#        2   3      4
#        5
TREE = TokenTree((5, 6, 7, 8, 9, 4), (None, None, 0, 0, 1, 2), (-0.5, -1.0, -0.1, -2.0, -0.2, -0.3))


@pytest.mark.parametrize("num_draft_tokens", [None, 7, 8, 257])
def test_a_tree_that_is_small_enough_stays_whole(num_draft_tokens: int | None) -> None:
    assert narrowed(TREE, num_draft_tokens) == (TREE, tuple(range(6)))


@pytest.mark.parametrize(
    ("num_draft_tokens", "nodes"),
    [(1, ()), (2, (0,)), (3, (0, 2)), (4, (0, 2, 5)), (5, (0, 1, 2, 5)), (6, (0, 1, 2, 4, 5))],
)
def test_the_most_probable_paths_are_kept(num_draft_tokens: int, nodes: tuple[int, ...]) -> None:
    assert narrowed(TREE, num_draft_tokens) == (TREE.only(nodes), nodes)


def test_without_probabilities_the_upper_levels_are_kept() -> None:
    silent = TokenTree(TREE.token_ids, TREE.parent_indices)
    found = [narrowed(silent, count) for count in (2, 4, 6)]
    assert [nodes for _, nodes in found] == [(0,), (0, 1, 2), (0, 1, 2, 3, 4)]


def test_a_drawn_chain_is_cut_by_depth_with_its_distributions() -> None:
    """Its tokens must have no say: choosing among them would change what is drawn."""
    distributions = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    for tokens in itertools.permutations((1, 2, 3, 4)):
        kept, _ = narrowed(DrawnChain.of(tokens, distributions), 3)
        assert isinstance(kept, DrawnChain)
        assert kept.token_ids == tokens[:2]
        assert torch.equal(kept.draft_log_probs, distributions[:2])


def _random_tree(source: random.Random, log_probs: tuple[float, ...]) -> TokenTree:
    parents = [source.choice([None, *range(node)]) for node in range(source.randint(1, 12))]
    return TokenTree(
        tuple(range(len(parents))), tuple(parents), tuple(source.choice(log_probs) for _ in parents)
    )


@pytest.mark.parametrize("log_probs", [(-0.5, -1.0, -3.0), (-1e30, -0.1, 0.0, 2.0, 1e30)])
def test_no_node_stays_without_its_parent_or_for_a_less_probable_one(
    log_probs: tuple[float, ...],
) -> None:
    """Not even where a draft says probabilities that there are none of."""
    source = random.Random(3)
    for _ in range(300):
        tree = _random_tree(source, log_probs)
        num_draft_tokens = source.randint(1, len(tree))
        kept, nodes = narrowed(tree, num_draft_tokens)
        assert len(kept) == len(nodes) == num_draft_tokens - 1
        parents = {tree.parent_indices[node] for node in nodes}
        assert parents <= {None, *nodes}
        worth = [
            math.fsum(min(tree.log_probs[each], 0.0) for each in tree.path(node))
            for node in range(len(tree))
        ]
        left_out = set(range(len(tree))) - set(nodes)
        least = min((worth[node] for node in nodes), default=0.0)
        assert all(worth[node] <= least + 1e-9 for node in left_out)
