"""A given tree as rows of a pass that computes its nodes, and what may follow them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.kv.upload import Array
from shared.runtime.round_batches import WALK_LINE, WALK_PARENT, WALK_TOKEN
from shared.tokens import TokenTree, TreeShape


@dataclass(frozen=True, slots=True)
class WalkedTree:
    """The nodes of a tree that are computed: K a level, those with children among them.

    Attributes:
        levels: see `PassTree`. Where a level has fewer nodes, token 0 behind its first parent fills
            it up, which is a row like any other.
    """

    tree: TokenTree
    levels: tuple[tuple[Sequence[int], Sequence[int]], ...]

    @classmethod
    def of(cls, tree: TokenTree, num_levels: int, topk: int) -> WalkedTree:
        """Lays out a tree that is within that size, see `walked_shape`."""
        inner, paths = set(tree.parent_indices), _path_scores(tree)
        by_depth: list[list[int]] = [[] for _ in range(num_levels)]
        for node, depth in enumerate(tree.depths):
            by_depth[depth - 1].append(node)
        levels: list[tuple[list[int], list[int]]] = []
        places: dict[int | None, int] = {None: 0}
        for nodes in by_depth:
            kept = heapq.nsmallest(topk, nodes, key=lambda node: (node not in inner, -paths[node]))
            num_missing = topk - len(kept)
            parents = [places[tree.parent_indices[node]] for node in kept]
            levels.append(
                ([*(tree.token_ids[node] for node in kept), *[0] * num_missing],
                 [*parents, *[0] * num_missing])
            )  # fmt: skip
            places = {node: place for place, node in enumerate(kept)}
        return cls(tree, tuple(levels))

    def numbers(self) -> Array:
        """Returns `[L * K, 2 + L]` int64, level by level: the token of each node, the place of its
        parent in the level before, and the rows on the way to it, its own repeated at the end."""
        num_levels, topk = len(self.levels), len(self.levels[0][0])
        numbers = np.empty((num_levels * topk, WALK_LINE + num_levels), np.int64)
        for level, (token_ids, parents) in enumerate(self.levels):
            first = level * topk
            rows = slice(first, first + topk)
            numbers[rows, WALK_TOKEN], numbers[rows, WALK_PARENT] = token_ids, parents
            if level:
                above = first - topk + np.array(parents)
                numbers[rows, WALK_LINE:] = numbers[above, WALK_LINE:]
            numbers[rows, WALK_LINE + level :] = np.arange(first, first + topk)[:, None]
        return numbers


def walked_shape(tree: TokenTree, shape: TreeShape) -> TreeShape:
    """Returns the depth and the width of passes that walk a tree: those of a shape, or more where
    the tree needs more."""
    depths = tree.depths
    inner = Counter(depths[node] for node in set(tree.parent_indices) if node is not None)
    num_steps = max((shape.num_steps, *depths))
    topk = max((shape.topk, *inner.values()))
    return TreeShape(num_steps, topk, max(shape.num_draft_tokens, num_steps + 1))


def _path_scores(tree: TokenTree) -> list[float]:
    """Returns the score of the path to each node; where there are none, earlier ones are better."""
    scores: list[float] = []
    for node, parent in enumerate(tree.parent_indices):
        own = tree.log_probs[node] if tree.log_probs else -1.0
        scores.append(own + (0.0 if parent is None else scores[parent]))
    return scores
