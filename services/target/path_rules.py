"""The rules that decide trees with fresh randomness, from the target's distributions of their rows.

A tree that came without the distributions of its tokens is decided by the point-mass rule, whatever
drew it: that rule takes a child with the target's probability of it, so any tree is good for it
that does not know the target's coins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.speculation.rejection import ChainRule, DrawnChain, accept_chains
from shared.speculation.verify import (
    EXACT,
    AcceptedPath,
    Thresholds,
    accept_point_mass,
    point_mass_draws,
)
from shared.tokens import TokenTree


class PathRule(Protocol):
    """Decides the trees of a step."""

    def __call__(self, log_probs: Tensor, trees: Sequence[TokenTree]) -> list[AcceptedPath]:
        """Returns one path for each tree. Waits for the device.

        Args:
            log_probs: `[R, V]` float32, the target's distributions; for each tree the row of its
                root, then the rows of its nodes.
        """


class PointMassRule:
    """Args:
    generator: on the host; the source of fresh randomness.
    thresholds: below 1 they are lossy.
    """

    def __init__(self, generator: torch.Generator, thresholds: Thresholds = EXACT) -> None:
        self._generator = generator
        self._thresholds = thresholds

    def __call__(self, log_probs: Tensor, trees: Sequence[TokenTree]) -> list[AcceptedPath]:
        """See `PathRule`."""
        draws = point_mass_draws(log_probs, trees, self._generator)
        return [
            accept_point_mass(tree, each, self._thresholds)
            for tree, each in zip(trees, draws, strict=True)
        ]


class DrawnChainRule:
    """Decides drawn chains by their distributions, and all other trees as point masses.

    Args:
        generator: on the host; the source of fresh randomness.
    """

    def __init__(self, rule: ChainRule, generator: torch.Generator) -> None:
        self._rule = rule
        self._generator = generator
        self._point_mass = PointMassRule(generator)

    def __call__(self, log_probs: Tensor, trees: Sequence[TokenTree]) -> list[AcceptedPath]:
        """See `PathRule`. Waits twice where trees of both kinds come together."""
        rows = torch.split(log_probs, [1 + len(tree) for tree in trees])
        chains = {
            place: tree
            for place, tree in enumerate(trees)
            if isinstance(tree, DrawnChain) and tree.token_ids
        }
        others = [place for place in range(len(trees)) if place not in chains]
        paths: dict[int, AcceptedPath] = {}
        if chains:
            distributions = torch.cat([rows[place] for place in chains])
            found = accept_chains(distributions, list(chains.values()), self._rule, self._generator)
            paths.update(zip(chains, found, strict=True))
        if others:
            distributions = torch.cat([rows[place] for place in others])
            found = self._point_mass(distributions, [trees[place] for place in others])
            paths.update(zip(others, found, strict=True))
        return [paths[place] for place in range(len(trees))]
