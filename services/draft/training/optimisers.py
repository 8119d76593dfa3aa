"""Optimisers of a head and their learning rate."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer


class OptimiserKind(enum.Enum):
    """MUON takes the matrices of the layers and leaves norms, biases and lm_head to AdamW."""

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
        """One update at `factor` times the highest rate; clears the gradients."""
        for optimiser in self._all:
            for group in optimiser.param_groups:
                group["lr"] = self._rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """Returns what `restore` takes."""
        return [optimiser.state_dict() for optimiser in self._all]

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Goes on from `state`."""
        for optimiser, state in zip(self._all, states, strict=True):
            optimiser.load_state_dict(state)


def rate_factor(progress: float, *, warm_up: float = 0.02, cool_down: float = 0.5) -> float:
    """Returns the share of the highest rate at `progress` in [0, 1]: up, level, then down to 0.

    Args:
        warm_up, cool_down: shares of the run.
    """
    if progress < warm_up:
        return max(progress, 1e-3) / warm_up
    return min(1.0, max(0.0, (1.0 - progress) / cool_down))
