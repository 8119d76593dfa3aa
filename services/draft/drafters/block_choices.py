"""The best tokens of each position of a block, which was scored without knowing the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.draft.likely_verdicts import Continuation
from shared.speculation.block_tree import grow_block_tree
from shared.speculation.topk import stable_topk
from shared.tokens import TokenTree, TreeShape


@dataclass(frozen=True, slots=True)
class BlockChoices:
    """Marginals of P positions, the best W tokens of each, best first.

    Attributes:
        token_ids, log_probs: `[P][W]`.
    """

    token_ids: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]

    def __iter__(self) -> Iterator[Sequence[Continuation]]:
        """Yields the choices of each position."""
        return (self.at(position) for position in range(len(self.token_ids)))

    def at(self, position: int) -> Sequence[Continuation]:
        """Returns the choices of a position; none behind the last."""
        if position >= len(self.token_ids):
            return ()
        return list(zip(self.token_ids[position], self.log_probs[position], strict=True))

    def tree(self, shape: TreeShape) -> TokenTree:
        """Returns the best nodes of the first `shape.num_steps` positions."""
        depth, topk = shape.num_steps, shape.topk
        return grow_block_tree(
            [row[:topk] for row in self.token_ids[:depth]],
            [row[:topk] for row in self.log_probs[:depth]],
            shape.max_node_count,
        )


def best_choices(scores: Tensor, width: int) -> list[BlockChoices]:
    """Returns the choices of each block. Waits for the device once.

    Args:
        scores: `[N, P, V]` float32 log probabilities.
        width: choices a position, V at most.
    """
    best = stable_topk(scores, min(width, scores.shape[2]))
    # Token ids are exact in float64, so one transfer brings both.
    log_probs, token_ids = torch.stack([part.to(torch.float64) for part in best]).tolist()
    return [
        BlockChoices([[int(token) for token in row] for row in tokens], values)
        for tokens, values in zip(token_ids, log_probs, strict=True)
    ]
