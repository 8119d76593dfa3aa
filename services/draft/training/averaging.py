"""Weighted average of the weights of heads of one shape.

A head that was trained further, for other data or more of its own steps, gains there and loses a
little elsewhere; between it and the one that it began from there is often one that keeps both.
Source: Wortsman et al., Robust fine-tuning of zero-shot models, arXiv 2109.01903, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.training.heads import Head
from shared.errors import CheckpointError


def averaged(heads: Sequence[Head], shares: Sequence[float]) -> Head:
    """Returns the first of `heads`, with the mean of all their weights in it.

    Args:
        shares: of each head in the mean, positive; they need not add up to 1.

    Raises:
        CheckpointError: heads differ in shape or in the tokens that they can draft.
    """
    first, *others = heads
    for number, other in enumerate(others, 2):
        if other.shape != first.shape:
            raise CheckpointError(f"head {number} has another shape than the first")
    states = [head.state_dict() for head in heads]
    for name, tensor in states[0].items():
        tensors = [state[name] for state in states]
        if tensor.is_floating_point():
            tensor.copy_(_mean(tensors, shares))
        elif not all(torch.equal(each, tensor) for each in tensors):
            raise CheckpointError(f"heads differ in {name}: they can draft other tokens")
    return first


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    pairs = zip(tensors, shares, strict=True)
    total = sum((share * tensor.double() for tensor, share in pairs), torch.zeros(()))
    return total / sum(shares)
