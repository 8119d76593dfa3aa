"""Gated feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.activation import silu_mul
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
        return self.down(silu_mul(self.gate_up(hidden)))

    def part(self, hidden: Tensor) -> Tensor | Part:
        """Returns the result, or this process's part of it; see `Linear.part`."""
        return self.down.part(silu_mul(self.gate_up(hidden)))
