"""Optimisers of a head, their learning rate, and averages of weights."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from services.draft.training.heads import Head
from shared.errors import CheckpointError

_MAX_NORM = 1.0
"""Most of the norm of all gradients together; larger ones are clipped."""


class OptimiserKind(enum.Enum):
    """MUON optimises the matrices of the layers; norms, biases and lm_head have AdamW."""

    ADAMW = "adamw"
    MUON = "muon"


class Optimisers:
    """One or two optimisers that step together.

    Args:
        rate: highest learning rate.
        decay: weight decay of matrices.
    """

    def __init__(self, head: nn.Module, kind: OptimiserKind, *, rate: float, decay: float) -> None:
        named = list(head.named_parameters())
        self._parameters = [p for _, p in named]
        matrices = [p for name, p in named if p.dim() == 2 and "lm_head" not in name]
        scores = [p for name, p in named if p.dim() == 2 and "lm_head" in name]
        vectors = [p for _, p in named if p.dim() != 2]
        groups: list[dict[str, Any]] = [
            {"params": scores, "weight_decay": decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._all: list[Optimizer] = []
        if kind is OptimiserKind.MUON:
            muon = Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            self._all.append(muon)
        else:
            groups.append({"params": matrices, "weight_decay": decay})
        used = [group for group in groups if group["params"]]
        self._all.append(AdamW(used, lr=rate, betas=(0.9, 0.95)))
        self._rate = rate

    def step(self, factor: float) -> None:
        """Clips the gradients, updates at `factor` times the highest rate, clears the gradients."""
        nn.utils.clip_grad_norm_(self._parameters, _MAX_NORM)
        for optimiser in self._all:
            for group in optimiser.param_groups:
                group["lr"] = self._rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        return [optimiser.state_dict() for optimiser in self._all]

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        for optimiser, state in zip(self._all, states, strict=True):
            optimiser.load_state_dict(state)


def rate_factor(progress: float, *, warm_up: float = 0.02, cool_down: float = 0.5) -> float:
    """Returns the factor of the highest rate at `progress` in [0, 1]: up, level, then down to 0.

    Args:
        warm_up, cool_down: shares of the run.
    """
    if progress < warm_up:
        return max(progress, 1e-3) / warm_up
    return min(1.0, max(0.0, (1.0 - progress) / cool_down))


def averaged(heads: Sequence[Head], shares: Sequence[float]) -> Head:
    """Returns the first of `heads`, with the weighted mean of all their weights.

    A head that was trained further, on other data or for more steps of its own drafts, is better
    there and a little worse elsewhere. A mean of it and its initial head often keeps both gains.

    Source: Wortsman et al., Robust fine-tuning of zero-shot models, arXiv 2109.01903, section 3.

    Args:
        shares: weight of each head in the mean, positive; they need not add up to 1.

    Raises:
        CheckpointError: heads differ in shape or in the tokens that they can draft.
    """
    first = heads[0]
    for number, head in enumerate(heads, 1):
        if head.shape != first.shape:
            raise CheckpointError(f"head {number} has another shape than the first")
    states = [head.state_dict() for head in heads]
    for name, tensor in states[0].items():
        tensors = [state[name] for state in states]
        if tensor.is_floating_point():
            pairs = zip(tensors, shares, strict=True)
            total = sum((share * part.double() for part, share in pairs), torch.zeros(()))
            tensor.copy_(total / sum(shares))
        elif not all(torch.equal(other, tensor) for other in tensors):
            raise CheckpointError(f"heads differ in {name}: they can draft other tokens")
    return first
