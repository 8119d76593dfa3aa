"""Trees over the marginals of a block: every position has been scored without knowing the others.

Source: DDTree, arXiv 2604.12989, algorithm 1: the nodes with the highest products of marginals,
found best first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.tokens import TokenTree


@dataclass(frozen=True, slots=True, order=True)
class _Prospect:
    """A node that may be next; the earlier found wins a tie.

    Attributes:
        cost: minus the score of its path.
        base: score of the path to its parent.
        rank: its place among the parent's children.
    """

    cost: float
    number: int
    base: float = field(compare=False)
    parent: int | None = field(compare=False)
    depth: int = field(compare=False)
    rank: int = field(compare=False)


def grow_block_tree(
    token_ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], max_nodes: int
) -> TokenTree:
    """Returns the `max_nodes` nodes whose paths have the highest sums of scores.

    A path's score is at most that of the path before its last token, so a node's parent is always
    chosen before it. With one token a position the tree is a chain.

    Args:
        token_ids: the best tokens of each position, best first.
        log_probs: their scores, at most 0; what is -inf is left out.
    """
    nodes: list[_Prospect] = []
    prospects: list[_Prospect] = []
    num_found = 0

    def find(base: float, parent: int | None, depth: int, rank: int) -> None:
        nonlocal num_found
        if depth == len(log_probs) or rank == len(log_probs[depth]):
            return
        # Rounding can leave a log probability just above 0; a path must not beat its prefix.
        score = base + min(log_probs[depth][rank], 0.0)
        if score > -math.inf:
            heapq.heappush(prospects, _Prospect(-score, num_found, base, parent, depth, rank))
            num_found += 1

    find(0.0, None, 0, 0)
    while prospects and len(nodes) < max_nodes:
        best = heapq.heappop(prospects)
        nodes.append(best)
        find(-best.cost, len(nodes) - 1, best.depth + 1, 0)
        find(best.base, best.parent, best.depth, best.rank + 1)
    return TokenTree(
        token_ids=tuple(token_ids[node.depth][node.rank] for node in nodes),
        parent_indices=tuple(node.parent for node in nodes),
        log_probs=tuple(min(log_probs[node.depth][node.rank], 0.0) for node in nodes),
    )
