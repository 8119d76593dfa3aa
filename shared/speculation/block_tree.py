"""Trees over the marginals of a block, whose positions are scored independently of each other.

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
class _Candidate:
    """A node that the tree may take next; of equal costs the one found earlier comes first.

    Attributes:
        cost: negative score of the node's path.
        number: order in which nodes are found.
        base: score of the path to the parent.
        rank: place among the parent's children.
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
        log_probs: their scores, at most 0; tokens of score -inf are left out.
    """
    nodes: list[_Candidate] = []
    heap: list[_Candidate] = []
    num_pushed = 0

    def push(base: float, parent: int | None, depth: int, rank: int) -> None:
        nonlocal num_pushed
        if depth == len(log_probs) or rank == len(log_probs[depth]):
            return
        # Rounding can leave a log probability just above 0; a path must not beat its prefix.
        score = base + min(log_probs[depth][rank], 0.0)
        if score > -math.inf:
            heapq.heappush(heap, _Candidate(-score, num_pushed, base, parent, depth, rank))
            num_pushed += 1

    push(0.0, None, 0, 0)
    while heap and len(nodes) < max_nodes:
        best = heapq.heappop(heap)
        nodes.append(best)
        push(-best.cost, len(nodes) - 1, best.depth + 1, 0)
        push(best.base, best.parent, best.depth, best.rank + 1)
    return TokenTree(
        token_ids=tuple(token_ids[node.depth][node.rank] for node in nodes),
        parent_indices=tuple(node.parent for node in nodes),
        log_probs=tuple(min(log_probs[node.depth][node.rank], 0.0) for node in nodes),
    )
