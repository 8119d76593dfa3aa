"""Rotary position embedding in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.kernel_settings import runs_triton


def position_tables(
    positions: Tensor, frequencies: Tensor, attention_factor: float
) -> tuple[Tensor, Tensor]:
    """Returns the rotation tables of positions: one pass on CUDA, plain torch elsewhere.

    Args:
        positions: `[T]` int64.
        frequencies: `[D/2]` float32 radians a position, or `[T, D/2]`.
    """
    if runs_triton(positions):
        from shared.kernels.fused_triton import fused_tables

        return fused_tables(positions, frequencies, attention_factor)
    return rotation_tables(positions.unsqueeze(1) * frequencies, attention_factor)


def rotation_tables(angles: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """Returns the cosine and signed sine tables `[T, 1, D]` for `angles` `[T, D/2]` float32.

    The sine of the first half is negated, so that a rotation is two products and one sum:
    `x * cos + swap_halves(x) * signed_sin`.
    """
    cos = angles.cos()
    sin = angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates `heads` `[T, H, D]` by tables `[T, 1, D]`, in float32, back in its own dtype.

    Source: Su et al., arXiv 2104.09864, equation 34, with dimensions i and i + D/2 as pairs.
    """
    wide = heads.float()
    swapped = wide.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(wide * cos, swapped, signed_sin).to(heads.dtype)
