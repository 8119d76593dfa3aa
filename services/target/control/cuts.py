"""Which nodes of trees that are here are worth their rows. No torch.

Source: nodes ranked by the probability of their path, Miao et al., arXiv 2305.09781.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from services.target.control.goodput import StepTime
from shared.tokens import TokenTree


def best_cut(
    survivals: Sequence[Sequence[float]], num_rows: int, wait_s: float, step_s: StepTime
) -> list[list[int]]:
    """Returns the nodes of each drafted tree that are worth their row, in tree order.

    The trees compete: a deep node of a sure sequence can beat the first of a doubtful one. For any
    number of nodes the most probable are the best, so trying every number finds the optimum.

    Args:
        survivals: `[tree][node]`, probability that the path down to the node is accepted; never
            above that of the parent.
        num_rows: of the step without any node; each sequence in it commits a token for sure.
        wait_s: before a round with trees.
    """
    ranked = heapq.merge(*(_ranked(tree, nodes) for tree, nodes in enumerate(survivals)))
    order = [(tree, node) for _, tree, node in ranked]
    gains = [survivals[tree][node] for tree, node in order]
    tokens, best_size = float(num_rows), 0
    best_rate = _per_second(tokens, wait_s + step_s(num_rows))
    for size, gain in enumerate(gains, start=1):
        tokens += gain
        rate = _per_second(tokens, wait_s + step_s(num_rows + size))
        if rate >= best_rate:
            best_rate, best_size = rate, size
    kept: list[list[int]] = [[] for _ in survivals]
    for tree, node in order[:best_size]:
        kept[tree].append(node)
    return [sorted(nodes) for nodes in kept]


def _ranked(tree: int, survivals: Sequence[float]) -> list[tuple[float, int, int]]:
    """Parents come before children of the same probability, because they stand before them."""
    return sorted((-survival, tree, node) for node, survival in enumerate(survivals))


def _per_second(tokens: float, duration_s: float) -> float:
    return tokens / duration_s if duration_s > 0 else tokens


def path_survivals(tree: TokenTree, acceptance: Callable[[TokenTree, int], float]) -> list[float]:
    """Returns the probability that each node's path is accepted.

    Args:
        acceptance: of a node where its parent is accepted.
    """
    survivals: list[float] = []
    for node, parent in enumerate(tree.parent_indices):
        above = 1.0 if parent is None else survivals[parent]
        survivals.append(above * min(acceptance(tree, node), 1.0))
    return survivals
