"""Products with a constant weight matrix held in 8 bits.

Each row of the matrix, that is each output channel, has a scale of its own, so that its largest
element takes the whole range. Activations are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight `[N, K]` that is `values * scales`.

    Attributes:
        values: `[N, K]` int8 or float8_e4m3fn.
        scales: `[N, 1]` float32, positive.
        dtype: of the weight it was made from.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor, stored: torch.dtype) -> QuantisedWeight:
        """Rounds `weight` `[N, K]` to the nearest values that `stored` holds."""
        limit = _LIMITS[stored]
        exact = weight.float()
        largest = exact.abs().amax(dim=1, keepdim=True)
        # A channel of zeros keeps the scale of 1.
        scales = torch.where(largest > 0.0, largest / limit, 1.0)
        scaled = (exact / scales).clamp_(-limit, limit)
        values = scaled.round_() if stored is torch.int8 else scaled
        return cls(values.to(stored), scales, weight.dtype)

    @property
    def num_saved_bytes(self) -> int:
        """Memory this takes less than the weight it was made from."""
        own = self.values.nbytes + self.scales.nbytes
        return self.values.numel() * self.dtype.itemsize - own

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns `[N, K]` in `dtype`."""
        # Scaled in float32: half precision would overflow on e4m3's largest values times a scale
        # and round twice.
        return self.values.to(torch.float32).mul_(self.scales).to(dtype)


def quantised_linear(inputs: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """Returns `inputs @ weight.T + bias`: `[T, K]` to `[T, N]`.

    The weight is expanded for the time of the product, so this saves memory and no time.
    """
    return F.linear(inputs, weight.dequantised(inputs.dtype), bias)
