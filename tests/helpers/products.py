"""Errors of matrix products of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Largest `product_error` of results that are rounded to a type."""


def product_error(
    actual: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None = None
) -> float:
    """Returns the largest error of a product `[T, N]`, relative to the norms of its factors.

    Args:
        inputs: `[T, K]`.
        weight: `[N, K]`, with the values that the kernel uses.
        bias: `[N]`.
    """
    exact = inputs.double() @ weight.double().T
    size = inputs.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    return float(((actual.double() - exact).abs() / size).max())
