"""Gated feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.partials import Partials
from shared.layers.linear import Linear
from shared.layers.tensor_group import Part


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(silu(gate(x)) * up(x))` with gate and up as one product.

    Attributes:
        gate_up: `H` to `2N`, gate first.
        down: `N` to `H`.
    """

    gate_up: Linear
    down: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[T, H]` to `[T, H]`."""
        return self.down(self.gate_up.gated(hidden))

    def partials(self, hidden: Tensor) -> Tensor | Partials:
        """Returns the result, or its parts; see `Linear.partials`."""
        return self.down.partials(self.gate_up.gated(hidden))

    def part(self, hidden: Tensor) -> Tensor | Partials | Part:
        """Returns the result, or what adds up to it; see `Linear.part`."""
        return self.down.part(self.gate_up.gated(hidden))
