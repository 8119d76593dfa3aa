"""Root-mean-square normalisation, reference implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales the last axis of `hidden` `[..., D]` to unit root mean square, times `weight`.

    Computes in float32 and rounds to the dtype of `hidden` before the weight is applied. `weight`
    broadcasts against `hidden`.

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.
    """
    wide = hidden.float()
    mean_square = (wide * wide).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square.add_(eps))).to(hidden.dtype) * weight
