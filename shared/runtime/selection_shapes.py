"""Sizes of rounds whose trees come from elsewhere. Few, since each has graphs of its own."""

from __future__ import annotations

from collections.abc import Iterable

from shared.tokens import TokenTree, TreeShape

_ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_DEPTHS = (2, 4, 8, 16, 32)
MAX_TREE_ROWS = _ROWS[-1]
MAX_TREE_DEPTH = _DEPTHS[-1]
# Only whether nodes have siblings matters.
_CHAIN, _BRANCHED = 1, 2
PLAIN_SHAPE = TreeShape(1, _CHAIN, _ROWS[0])
"""Of rounds without any tree."""


def covering_shape(trees: Iterable[TokenTree]) -> TreeShape | None:
    """Returns the smallest shape in which rounds take all of some trees; None where they take none
    that large."""
    num_rows, max_depth, topk = 2, 1, _CHAIN
    for tree in trees:
        num_rows = max(num_rows, len(tree) + 1)
        if not _is_chain(tree):
            topk = _BRANCHED
        max_depth = max(max_depth, *tree.depths, 0)
    return _covering(num_rows, max_depth, topk)


def covering_shape_of(shape: TreeShape) -> TreeShape | None:
    """Returns the shape in which rounds take every tree of a shape; None where there is none."""
    return _covering(
        shape.max_node_count + 1, shape.num_steps, _CHAIN if shape.topk == 1 else _BRANCHED
    )


def _covering(num_rows: int, max_depth: int, topk: int) -> TreeShape | None:
    rows = next((size for size in _ROWS if size >= num_rows), None)
    depth = next((size for size in _DEPTHS if size >= max_depth), None)
    if rows is None or depth is None:
        return None
    if topk == _CHAIN and rows - 1 <= MAX_TREE_DEPTH:
        return TreeShape(rows - 1, _CHAIN, rows)
    return TreeShape(min(depth, rows - 1), _BRANCHED, rows)


def closest_shape(wanted: TreeShape, made: Iterable[TreeShape]) -> TreeShape:
    """Returns the smallest shape that takes what `wanted` takes: of those whose graphs are made, if
    it has fewer than twice the rows; to make some takes as long as many rounds."""
    near = [
        shape
        for shape in made
        if wanted.num_draft_tokens <= shape.num_draft_tokens < 2 * wanted.num_draft_tokens
        and wanted.num_steps <= shape.num_steps
        and wanted.topk <= shape.topk
    ]
    return min(near, key=lambda shape: shape.num_draft_tokens, default=wanted)


def _is_chain(tree: TokenTree) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(tree.parent_indices) if node) and (
        not tree.parent_indices or tree.parent_indices[0] is None
    )
