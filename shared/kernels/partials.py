"""Products whose parts are left for the kernel after them to add.

A product of few rows is cut along its depth, so that enough programs read the weight. The kernel
after it reads the result anyway; that it adds the parts saves one that does nothing else.

Source: split-K with a fused reduction, as in stream-K, Osama et al., arXiv 2301.03598, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Partials:
    """A tensor `[T, ...]` that is the sum of its parts.

    Attributes:
        parts: `[S, T, ...]` float32, contiguous, to be added in order, from zero.
        dtype: that the sum is rounded to.
    """

    parts: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the sum."""
        return self.parts.shape[1:]

    def view(self, *shape: int) -> Partials:
        """Returns the same sum in another shape."""
        return Partials(self.parts.view(len(self.parts), *shape), self.dtype)

    def total(self) -> Tensor:
        """Returns the sum."""
        total = torch.zeros_like(self.parts[0])
        for part in self.parts:
            total += part
        return total.to(self.dtype)


def total_of(tensor: Tensor | Partials) -> Tensor:
    """Returns a tensor that may be left in parts."""
    return tensor.total() if isinstance(tensor, Partials) else tensor
