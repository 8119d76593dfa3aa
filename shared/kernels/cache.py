"""Reads and writes of one layer's KV cache, whose element type may differ from the model's.

e4m3 has 4 bits of exponent, 3 of mantissa and a maximum of 448. So the keys and the values of each
head have a scale, the same for all tokens. Scales are powers of two, which only change exponents.
Source: Micikevicius et al., arXiv 2209.05433, section 3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.kernel_settings import dispatched
from shared.kernels.pointwise import Partials, plain_rms_norm, rotate, total_of

LARGEST = 448.0
# The bits of an e4m3 number, shifted to the top of a float32, are 2^-120 of its value.
_SHIFT, _MASK, _FACTOR = 20, -0x78100000, 2.0**120


def widened(values: Tensor) -> Tensor:
    """Returns the same numbers in float32."""
    if values.device.type != "cpu":
        return values.to(torch.float32)
    # Ten times as fast as torch's conversion on a CPU.
    bits = values.view(torch.int8).to(torch.int32).bitwise_left_shift_(_SHIFT)
    return bits.bitwise_and_(_MASK).view(torch.float32).mul_(_FACTOR)


def narrowed(values: Tensor) -> Tensor:
    """Returns the nearest e4m3 numbers; numbers out of range are clamped."""
    return values.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Scales of one layer of an e4m3 cache, `[Hkv]` float32, powers of two.

    Attributes:
        keys: a key is its stored number times the scale of its head.
        values: likewise.
    """

    keys: Tensor
    values: Tensor


def store(cache: Tensor, slots: Tensor, heads: Tensor, scales: Tensor | None) -> None:
    """Writes `heads` `[T, Hkv, D]` at `slots` `[T]` of `cache` `[num_slots, Hkv, D]`.

    Args:
        scales: `[Hkv]` for an e4m3 cache; None for any other.
    """
    if scales is None:
        cache.index_copy_(0, slots, heads.to(cache.dtype))
        return
    narrow = narrowed(heads.float() / scales.unsqueeze(1))
    # torch has no index copy for e4m3.
    cache.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))


def load(cache: Tensor, slots: Tensor, scales: Tensor | None) -> Tensor:
    """Returns the rows at `slots` `[T]` in float32, `[T, Hkv, D]`; arguments as in `store`."""
    rows = cache.index_select(0, slots)
    return rows.float() if scales is None else widened(rows) * scales.unsqueeze(1)


@dispatched("fused_triton")
def rotate_into_cache(
    heads: Tensor | Partials,
    norm_weight: Tensor | None,
    eps: float,
    tables: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    scales: CacheScales | None = None,
) -> Tensor:
    """Normalises and rotates queries and keys, and stores keys and values.

    Args:
        heads: `[T, Hq + 2 * Hkv, D]`: query, key and value heads of each row.
        norm_weight: `[Hq + Hkv, D]`, applied to each head before rotation; None in most families.
        tables: cosine and signed sine, `[T, 1, D]` float32.
        cache: keys and values of one layer, `[num_slots, Hkv, D]`; written in place.
        slots: `[T]` int64, slot of each row; only padding rows may share a slot.
        scales: scales of an e4m3 cache; None for any other.

    Returns:
        The rotated queries `[T, Hq, D]`.
    """
    heads, (keys, values) = total_of(heads), cache
    num_rotated = heads.shape[1] - keys.shape[1]
    num_heads = num_rotated - keys.shape[1]
    rotated = heads[:, :num_rotated]
    if norm_weight is not None:
        rotated = plain_rms_norm(rotated, norm_weight, eps)
    rotated = rotate(rotated, *tables)
    store(keys, slots, rotated[:, num_heads:], None if scales is None else scales.keys)
    store(values, slots, heads[:, num_rotated:], None if scales is None else scales.values)
    return rotated[:, :num_heads]
