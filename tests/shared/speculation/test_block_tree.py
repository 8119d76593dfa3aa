"""Trees over marginals against the enumeration of every path."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from shared.speculation.tree import grow_block_tree

Path_ = tuple[int, ...]


def _marginals(seed: int, depth: int, width: int) -> tuple[list[list[int]], list[list[float]]]:
    draw = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(depth, width + 3, generator=draw, dtype=torch.float64)
    best = logits.log_softmax(1).topk(width, dim=1)
    return best.indices.tolist(), best.values.tolist()


def _enumerated(
    token_ids: list[list[int]], log_probs: list[list[float]], max_nodes: int
) -> dict[Path_, float]:
    values = {
        tuple(token_ids[level][rank] for level, rank in enumerate(ranks)): sum(
            log_probs[level][rank] for level, rank in enumerate(ranks)
        )
        for length in range(1, len(token_ids) + 1)
        for ranks in itertools.product(*(range(len(row)) for row in log_probs[:length]))
    }
    return dict(sorted(values.items(), key=lambda item: -item[1])[:max_nodes])


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 12, 31, 200])
@pytest.mark.parametrize(("depth", "width"), [(1, 4), (4, 1), (4, 3), (3, 5), (5, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_nodes_are_those_with_the_highest_products(
    seed: int, depth: int, width: int, max_nodes: int
) -> None:
    token_ids, log_probs = _marginals(seed, depth, width)
    tree = grow_block_tree(token_ids, log_probs, max_nodes)
    values = {
        tuple(tree.token_ids[n] for n in tree.path(node)): sum(
            tree.log_probs[n] for n in tree.path(node)
        )
        for node in range(len(tree))
    }
    assert values == pytest.approx(_enumerated(token_ids, log_probs, max_nodes))


def test_one_token_a_position_is_a_chain() -> None:
    tree = grow_block_tree([[4], [5], [6]], [[-1.0], [-2.0], [-0.5]], 9)
    assert (tree.token_ids, tree.parent_indices) == ((4, 5, 6), (None, 0, 1))


def test_removed_tokens_and_what_follows_them_are_left_out() -> None:
    tree = grow_block_tree([[4, 1], [5, 2]], [[-1.0, -math.inf], [-math.inf, -math.inf]], 9)
    assert tree.token_ids == (4,)


def test_a_certain_position_keeps_parents_before_children() -> None:
    tree = grow_block_tree([[4, 1], [5, 2]], [[1e-7, -3.0], [1e-7, -1e-9]], 4)
    assert tree.token_ids[:3] == (4, 5, 2)
    assert max(tree.log_probs) <= 0.0
