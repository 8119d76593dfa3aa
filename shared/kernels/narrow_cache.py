"""Keys and values of one layer in a cache of another element type than the model's.

e4m3 has no room for numbers above 448, so each head's keys, and its values, have a factor that
holds for every token. Factors are powers of two: they change exponents only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.e4m3 import narrowed, widened


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Factors of one layer of an e4m3 cache, `[Hkv]` float32, powers of two.

    Attributes:
        keys: a key is what is stored times its head's factor.
        values: likewise.
    """

    keys: Tensor
    values: Tensor


def store(cache: Tensor, slots: Tensor, heads: Tensor, scales: Tensor | None) -> None:
    """Writes `heads` `[T, Hkv, D]` at `slots` `[T]` of `cache` `[num_slots, Hkv, D]`.

    Args:
        scales: `[Hkv]` of an e4m3 cache; None of any other.
    """
    if scales is None:
        cache.index_copy_(0, slots, heads.to(cache.dtype))
        return
    narrow = narrowed(heads.float() / scales.unsqueeze(1))
    # torch copies no e4m3 by index.
    cache.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))


def load(cache: Tensor, slots: Tensor, scales: Tensor | None) -> Tensor:
    """Returns the rows at `slots` `[T]` in float32, `[T, Hkv, D]`; arguments as in `store`."""
    rows = cache.index_select(0, slots)
    return rows.float() if scales is None else widened(rows) * scales.unsqueeze(1)
