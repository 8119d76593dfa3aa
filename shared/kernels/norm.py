"""Root-mean-square normalisation: one pass on CUDA, plain torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.kernel_settings import runs_triton
from shared.kernels.partials import Partials, total_of


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales the last axis of `hidden` `[..., D]` to unit root mean square, times `weight`.

    Computes in float32 and rounds to the dtype of `hidden` before the weight is applied, and
    after. `weight` broadcasts against `hidden`; it may be wider.

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.
    """
    if runs_triton(hidden) and weight.dim() == 1:
        from shared.kernels.fused_triton import fused_add_norm

        return fused_add_norm(hidden, None, weight, eps)[1]
    return plain_rms_norm(hidden, weight, eps)


def add_rms_norm(
    hidden: Tensor,
    update: Tensor | Partials | None,
    weight: Tensor,
    eps: float,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `hidden + update` and its norm, both `[T, D]`; `weight` is `[D]`.

    Without an update the first result is `hidden` itself.

    Args:
        rows: `[T]` int64, the rows of both that are wanted; None takes all.
    """
    if runs_triton(hidden):
        from shared.kernels.fused_triton import fused_add_norm

        return fused_add_norm(hidden, update, weight, eps, rows)
    total = hidden if update is None else hidden + total_of(update)
    if rows is not None:
        total = total.index_select(0, rows)
    return total, plain_rms_norm(total, weight, eps)


def plain_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain torch, on any device: the kernel's oracle."""
    wide = hidden.float()
    mean_square = (wide * wide).mean(-1, keepdim=True)
    normed = (wide * torch.rsqrt(mean_square.add_(eps))).to(hidden.dtype)
    return (normed * weight).to(hidden.dtype)
