"""Errors of matrix products of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.linear import scale_rows
from shared.kernels.quantised import QuantisedWeight, quantised_rows

ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Largest `product_error` of results that are rounded to a type."""
E4M3_ROUNDING = 4e-3
"""Largest `product_error` of products of e4m3 with e4m3, which are added with 14 bits."""


def rounding_of(weight: QuantisedWeight) -> float:
    """Returns the largest `product_error` of products of what is `multiplied`."""
    is_int8 = weight.values.dtype is torch.int8
    return ROUNDING[weight.dtype] if is_int8 else E4M3_ROUNDING


def multiplied(inputs: Tensor, weight: QuantisedWeight) -> Tensor:
    """Returns the numbers that are multiplied with `weight`, `[T, K]` float32: if a kernel does so,
    those that the inputs are rounded to."""
    if not weight.has_kernel:
        return inputs.float()
    is_by_block = scale_rows(weight.scales, len(weight.values)) > 0
    return rounded_rows(inputs, weight.values.dtype, is_by_block=is_by_block)


def rounded_rows(inputs: Tensor, stored: torch.dtype, *, is_by_block: bool) -> Tensor:
    """Returns the numbers that `quantised_rows` rounds to, `[T, K]` float32."""
    values, scales = quantised_rows.plain(inputs, stored, is_by_block=is_by_block)
    return values.float() * scales.t().repeat_interleave(inputs.shape[1] // len(scales), 1)


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
