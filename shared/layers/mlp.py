"""Gated feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from shared.kernels.activation import Activation, gate_mul
from shared.kernels.partials import Partials
from shared.layers.linear import Linear
from shared.layers.tensor_group import Part


class FeedForward(Protocol):
    """The second block of a decoder layer: one product after another, or experts."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[T, H]` to `[T, H]`."""

    def part(self, hidden: Tensor) -> Tensor | Partials | Part:
        """Returns the result, or what adds up to it; see `Linear.part`."""

    def routes(self, hidden: Tensor) -> Tensor | None:
        """Returns the experts `[T, k]` that rows take; None where there are none."""

    def steadied(self) -> FeedForward:
        """Returns the same block with products that keep a row's bits; see `Linear.steadied`."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(activation(gate(x)) * up(x))` with gate and up as one product.

    Attributes:
        gate_up: `H` to `2N`, gate first.
        down: `N` to `H`.
    """

    gate_up: Linear
    down: Linear
    activation: Activation = Activation.SILU

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[T, H]` to `[T, H]`."""
        return self.down(self._gated(hidden))

    def partials(self, hidden: Tensor) -> Tensor | Partials:
        """Returns the result, or its parts; see `Linear.partials`."""
        return self.down.partials(self._gated(hidden))

    def part(self, hidden: Tensor) -> Tensor | Partials | Part:
        """Returns the result, or what adds up to it; see `Linear.part`."""
        return self.down.part(self._gated(hidden))

    def routes(self, hidden: Tensor) -> Tensor | None:
        """See `FeedForward`."""

    def steadied(self) -> Mlp:
        """Returns the same block with products that keep a row's bits; see `Linear.steadied`."""
        return replace(self, gate_up=self.gate_up.steadied(), down=self.down.steadied())

    def _gated(self, hidden: Tensor) -> Tensor:
        if self.activation is Activation.SILU:
            return self.gate_up.gated(hidden)
        return gate_mul(self.gate_up(hidden), self.activation)
