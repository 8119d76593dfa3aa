"""Rows of token trees: row 0 is the root, row i + 1 is node i.

The root is the last committed token, whose KV is computed in the same forward as the nodes'. The
functions of one tree run on the host. What they and `verify.accept_path` do, `TreeRows` does for
all trees of a batch at once, in tensors of fixed shapes and without waiting for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.speculation.growth import SelectedNodes
from shared.tokens import TokenTree

NO_TOKEN = -1
"""Where a tree has fewer nodes than rows."""


def row_parents(tree: TokenTree) -> tuple[int | None, ...]:
    """Returns the row of each row's parent; None for the root."""
    return (None, *(0 if parent is None else parent + 1 for parent in tree.parent_indices))


def row_paths(tree: TokenTree) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids from the root's child down to each row; empty for the root."""
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, row_parents(tree)[1:], strict=True):
        assert parent is not None
        paths.append((*paths[parent], token_id))
    return tuple(paths)


@dataclass(frozen=True, slots=True)
class TreeRows:
    """B trees of T rows each.

    Attributes:
        token_ids: `[B, T]` int64; -1 where a tree has fewer nodes.
        parents: `[B, T]` int64, row of the parent; the root is its own.
        depths: `[B, T]` int64, distance from the root.
        visible: `[B, T, T]` bool, what each row sees: the root, its ancestors and itself.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor

    @property
    def num_nodes(self) -> Tensor:
        """`[B]` int64, nodes that each tree has."""
        return (self.token_ids[:, 1:] != NO_TOKEN).sum(dim=1)


@dataclass(frozen=True, slots=True)
class AcceptedRows:
    """The decisions on B trees of depth D.

    Attributes:
        counts: `[B]` int64, accepted nodes.
        rows: `[B, D + 1]` int64, the root's row, then those of the accepted path; element k
            beyond the path is k.
        token_ids: `[B, D + 1]` int64, the tokens to commit: the path's, then the bonus; 0 beyond.
    """

    counts: Tensor
    rows: Tensor
    token_ids: Tensor


def tree_rows(nodes: SelectedNodes, root_token_ids: Tensor, max_depth: int) -> TreeRows:
    """Lays out selected nodes behind their roots.

    Args:
        root_token_ids: `[B]` int64, the last committed token of each sequence.
        max_depth: of any node.
    """
    is_node = nodes.path > -math.inf
    # Candidates ascend, so the place of a parent among the kept ones can be searched.
    places = torch.searchsorted(nodes.candidates, nodes.parents - 1)
    parents = torch.where(is_node & (nodes.parents > 0), places + 1, 0)
    parents = torch.cat((torch.zeros_like(parents[:, :1]), parents), dim=1)
    tokens = torch.where(is_node, nodes.token_ids, NO_TOKEN)
    return rows_of_parents(
        torch.cat((root_token_ids.unsqueeze(1), tokens), dim=1), parents, max_depth
    )


def rows_of_parents(token_ids: Tensor, parents: Tensor, max_depth: int) -> TreeRows:
    """Returns trees from the tokens `[B, T]` and the parents `[B, T]` of their rows.

    Args:
        max_depth: of any node.
    """
    visible = _ancestors(parents, max_depth)
    return TreeRows(token_ids, parents, visible.sum(dim=2) - 1, visible)


def accept_rows(tree: TreeRows, drawn: Tensor, max_depth: int) -> AcceptedRows:
    """Returns the paths whose tokens are the ones the target drew.

    Args:
        drawn: `[B, T]` int64, the token each row drew; negative in a row, but the root's, that
            may not draw: a path ends before its node.
        max_depth: D, of any node; less than T.
    """
    batch_size, num_rows = drawn.shape
    matches = (tree.token_ids == drawn.gather(1, tree.parents)) & (drawn >= 0)
    matches[:, 0] = True
    # Siblings hold different tokens, so what is accepted is one path, ordered by row.
    accepted = (matches.unsqueeze(1) | ~tree.visible).all(dim=2)
    steps = torch.arange(max_depth + 1, device=drawn.device)
    # One place too many takes every row that is not accepted.
    places = torch.where(accepted, accepted.cumsum(dim=1) - 1, max_depth + 1)
    rows = torch.cat((steps, steps.new_zeros(1))).repeat(batch_size, 1)
    own = torch.arange(num_rows, device=drawn.device).expand_as(places)
    rows = rows.scatter(1, places, own)[:, : max_depth + 1]
    counts = accepted.sum(dim=1) - 1
    is_committed = steps <= counts.unsqueeze(1)
    token_ids = torch.where(is_committed, drawn.gather(1, rows), 0)
    return AcceptedRows(counts=counts, rows=rows, token_ids=token_ids)


def _ancestors(parents: Tensor, max_depth: int) -> Tensor:
    """Returns `[B, T, T]` bool, each row's ancestors and itself, from parents `[B, T]`."""
    rows = torch.arange(parents.shape[1], device=parents.device)
    ancestors = rows.expand_as(parents)
    visible = (ancestors.unsqueeze(2) == rows) | (rows == 0)
    for _ in range(max_depth - 1):
        ancestors = parents.gather(1, ancestors)
        visible = visible | (ancestors.unsqueeze(2) == rows)
    return visible
