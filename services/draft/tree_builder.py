"""Grows the token trees of several sequences in step, level by level, then keeps the best nodes.

Source: EAGLE-2, Li et al., arXiv 2406.16858, section 4: *expand* the nodes with the highest value
(the product of confidences along the path), then *rerank* all of them by value.

S sequences, K = min(topk, vocabulary), V the vocabulary. A *node* is any candidate ever scored, a
*frontier* the K nodes a sequence expands next. Nodes of a sequence are numbered level by level, so
a parent has a lower number than its child.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.tokens import TokenTree, TreeShape


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes to expand next, K a sequence.

    Attributes:
        token_ids: `[S][K]`.
        parents: `[S][K]`, place of each node's parent in the frontier before this one; None below
            the committed tokens.
    """

    token_ids: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int | None]]


class TreeBuilder:
    """Trees of one shape for S sequences. Every tensor stays on the device of the scores."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape
        self._values: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._frontier_nodes = torch.empty(0)
        self._num_nodes = 0

    @property
    def num_levels(self) -> int:
        """Expansions in all, the first included; a chain stops where its nodes are used up."""
        return min(self._shape.num_steps, self._shape.max_node_count)

    def start(self, log_probs: Tensor) -> Frontier:
        """Makes the first level from `[S, V]` log probabilities after the committed tokens."""
        width = min(self._shape.topk, log_probs.shape[1])
        best, tokens = log_probs.topk(width, dim=1)
        root = torch.full_like(tokens, -1)
        self._append(values=best, log_probs=best, tokens=tokens, parents=root)
        self._frontier_nodes = torch.arange(width, device=tokens.device).expand_as(tokens)
        return Frontier(_to_host(tokens), [[None] * width] * tokens.shape[0])

    def expand(self, log_probs: Tensor) -> Frontier:
        """Adds the children of the frontier from `[S * K, V]` log probabilities, in its order."""
        num_sequences, width = self._frontier_nodes.shape
        best, tokens = log_probs.topk(width, dim=1)
        best, tokens = (t.view(num_sequences, width * width) for t in (best, tokens))
        frontier_values = torch.cat(self._values, dim=1).gather(1, self._frontier_nodes)
        values = frontier_values.repeat_interleave(width, dim=1) + best
        parents = self._frontier_nodes.repeat_interleave(width, dim=1)
        first_node = self._num_nodes
        self._append(values=values, log_probs=best, tokens=tokens, parents=parents)
        chosen = _best(values, width)
        self._frontier_nodes = chosen + first_node
        return Frontier(_to_host(tokens.gather(1, chosen)), _to_host(chosen // width))

    def finish(self) -> list[TokenTree]:
        """Returns each sequence's best nodes as a tree.

        A value never exceeds its parent's and ties go to the lower number, so a kept node's parent
        is kept too. Tokens that the sampling transform rules out are no candidates.
        """
        values = torch.cat(self._values, dim=1)
        kept = _best(values, min(self._shape.max_node_count, values.shape[1])).sort(dim=1).values
        columns = (self._tokens, self._parents)
        tokens, parents = (torch.cat(column, dim=1).gather(1, kept) for column in columns)
        log_probs = torch.cat(self._log_probs, dim=1).gather(1, kept)
        # A sum with a ruled-out token is minus infinity, so its descendants go with it.
        is_possible = values.gather(1, kept).isfinite()
        return [
            _tree(*(column[row, is_kept].tolist() for column in (kept, tokens, parents, log_probs)))
            for row, is_kept in enumerate(is_possible)
        ]

    def _append(
        self, *, values: Tensor, log_probs: Tensor, tokens: Tensor, parents: Tensor
    ) -> None:
        self._values.append(values)
        self._log_probs.append(log_probs)
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._num_nodes += values.shape[1]


def _best(values: Tensor, count: int) -> Tensor:
    """Returns the columns of the `count` greatest values a row, the lower column among equals."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _to_host(tensor: Tensor) -> list[list[int]]:
    """The level's tokens are needed to lay out the next forward: one wait for the device."""
    rows: list[list[int]] = tensor.tolist()
    return rows


def _tree(
    nodes: list[int], token_ids: list[int], parents: list[int], log_probs: list[float]
) -> TokenTree:
    numbers = {node: number for number, node in enumerate(nodes)}
    return TokenTree(
        tuple(token_ids),
        tuple(numbers.get(parent) for parent in parents),
        tuple(log_probs),
    )
