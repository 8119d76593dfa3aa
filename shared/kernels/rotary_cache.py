"""From projected heads to rotated queries, and to keys and values in the cache."""

from __future__ import annotations

from torch import Tensor

from shared.kernels.kernel_settings import runs_triton
from shared.kernels.narrow_cache import CacheScales, store
from shared.kernels.norm import plain_rms_norm
from shared.kernels.partials import Partials, total_of
from shared.kernels.rotary import rotate


def rotate_into_cache(
    heads: Tensor | Partials,
    norm_weight: Tensor | None,
    eps: float,
    tables: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    scales: CacheScales | None = None,
) -> Tensor:
    """Normalises and rotates queries and keys, and stores keys and values: one pass on CUDA.

    Args:
        heads: `[T, Hq + 2 * Hkv, D]`: query, key and value heads of each row.
        norm_weight: `[Hq + Hkv, D]`, applied a head before rotation; None in most families.
        eps: of that norm.
        tables: cosine and signed sine, `[T, 1, D]` float32.
        cache: keys and values of one layer, `[num_slots, Hkv, D]`; written in place.
        slots: `[T]` int64, where each row goes; only padding rows may share one.
        scales: of an e4m3 cache; None of any other.

    Returns:
        The rotated queries `[T, Hq, D]`.
    """
    if runs_triton(slots):
        from shared.kernels.fused_triton import fused_rotate_store

        return fused_rotate_store(heads, norm_weight, eps, tables, cache, slots, scales)
    return plain_rotate_into_cache(total_of(heads), norm_weight, eps, tables, cache, slots, scales)


def plain_rotate_into_cache(
    heads: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    tables: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    scales: CacheScales | None = None,
) -> Tensor:
    """`rotate_into_cache` in plain torch, on any device: the kernel's oracle."""
    keys, values = cache
    num_rotated = heads.shape[1] - keys.shape[1]
    num_heads = num_rotated - keys.shape[1]
    rotated = heads[:, :num_rotated]
    if norm_weight is not None:
        rotated = plain_rms_norm(rotated, norm_weight, eps)
    rotated = rotate(rotated, *tables)
    store(keys, slots, rotated[:, num_heads:], None if scales is None else scales.keys)
    store(values, slots, heads[:, num_rotated:], None if scales is None else scales.values)
    return rotated[:, :num_heads]
