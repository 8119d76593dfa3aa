"""A linear layer over a prepared weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.linear import LinearWeight, linear


@dataclass(frozen=True, slots=True)
class Linear:
    """`inputs @ weight.T + bias`; build it with `of`, which prepares the weight."""

    weight: LinearWeight
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Prepares `weight` `[N, K]` for its device; it may be copied, so drop your reference."""
        return cls(LinearWeight.prepare(weight), bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        """`[T, K]` to `[T, N]`."""
        return linear(inputs, self.weight, self.bias)
