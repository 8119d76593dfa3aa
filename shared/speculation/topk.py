"""Top-k with a defined answer on ties, which torch.topk leaves to the device."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_BITS = 32
_SIGN_FREE = 0x7FFFFFFF


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k highest values of the last axis, best first; the lowest index wins a tie.

    Each value becomes an integer key that orders like (value, -index), so no two keys are equal
    and every device finds the same ones.

    Args:
        values: `[..., N]` float32 without NaN, N < 2^32.
        k: in [1, N].

    Returns:
        Values `[..., k]` float32 and indices `[..., k]` int64.
    """
    assert values.dtype == torch.float32
    # Adding zero turns -0.0, whose bits order below 0.0, into 0.0.
    bits = (values + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _SIGN_FREE, bits).to(torch.int64)
    size = values.shape[-1]
    descending_index = torch.arange(size - 1, -1, -1, device=values.device)
    keys = (ordered << _LOW_BITS) | descending_index
    best = keys.topk(k, dim=-1, largest=True, sorted=True).values
    indices = (size - 1) - (best & ((1 << _LOW_BITS) - 1))
    return values.gather(-1, indices), indices
