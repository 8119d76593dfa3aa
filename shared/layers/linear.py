"""A linear layer over a prepared weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.linear import LinearWeight, linear
from shared.kernels.quantised import QuantisedWeight, quantised_linear
from shared.model_options import Quantisation

_STORED = {Quantisation.INT8: torch.int8, Quantisation.FP8: torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Linear:
    """`inputs @ weight.T + bias`; build it with `of`, which prepares the weight."""

    weight: LinearWeight | QuantisedWeight
    bias: Tensor | None

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        quantisation: Quantisation = Quantisation.UNQUANT,
    ) -> Linear:
        """Prepares `weight` `[N, K]` for its device; it may be copied, so drop your reference."""
        if quantisation is Quantisation.UNQUANT:
            return cls(LinearWeight.prepare(weight), bias)
        return cls(QuantisedWeight.of(weight, _STORED[quantisation]), bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        """`[T, K]` to `[T, N]`."""
        if isinstance(self.weight, QuantisedWeight):
            return quantised_linear(inputs, self.weight, self.bias)
        return linear(inputs, self.weight, self.bias)
