"""The steps around latent attention: what enters the cache, and each head's own products.

One pass on CUDA, plain torch elsewhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.cache import store
from shared.kernels.kernel_settings import runs_triton
from shared.kernels.pointwise import Norm, Partials, plain_rms_norm, rotate, total_of

# Measured with MKL: a row of a product has the same bits for every multiple of 8 rows.
_ROW_MULTIPLE = 8


def enter(
    made: Tensor | Partials,
    query_norm: Norm | None,
    latent_norm: Norm,
    tables: tuple[Tensor, Tensor],
    cache: Tensor,
    slots: Tensor,
) -> Tensor | None:
    """Writes latent vectors, normed, and keys, rotated, to the cache.

    Args:
        made: `[T, Q + L + R]`: queries, latent vectors, keys.
        query_norm: weight `[Q]` and eps; None leaves the queries alone.
        latent_norm: weight `[L]` and eps.
        tables: cosine and signed sine, `[T, 1, R]` float32.
        cache: `[num_slots, 1, L + R]`; written in place.
        slots: `[T]` int64, where each row goes; only padding rows may share one.

    Returns:
        The normed queries `[T, Q]`, if they are normed.
    """
    if runs_triton(slots):
        from shared.kernels.latent_triton import fused_enter

        return fused_enter(made, query_norm, latent_norm, tables, cache, slots)
    return plain_enter(total_of(made), query_norm, latent_norm, tables, cache, slots)


def plain_enter(
    made: Tensor,
    query_norm: Norm | None,
    latent_norm: Norm,
    tables: tuple[Tensor, Tensor],
    cache: Tensor,
    slots: Tensor,
) -> Tensor | None:
    """`enter` in plain torch, on any device: the kernel's oracle."""
    latent_dim, rotary_dim = len(latent_norm[0]), tables[0].shape[-1]
    first_latent = made.shape[1] - latent_dim - rotary_dim
    queries, first_key = made[:, :first_latent], first_latent + latent_dim
    latents, keys = made[:, first_latent:first_key], made[:, first_key:]
    turned = rotate(keys.unsqueeze(1), *tables)
    normed = plain_rms_norm(latents, *latent_norm).unsqueeze(1)
    store(cache, slots, torch.cat((normed, turned), dim=-1), None)
    return None if query_norm is None else plain_rms_norm(queries, *query_norm)


def absorbed_queries(queries: Tensor, key_up: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Returns `[T, H, L + R]` of `[T, H, N + R]`: the first dimensions multiplied by `key_up`
    `[H, N, L]`, which is then not applied to keys, and the last ones rotated.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
    """
    if runs_triton(queries):
        from shared.kernels.latent_triton import fused_head_products

        return fused_head_products(queries, key_up, tables, is_transposed=True)
    return plain_absorbed_queries(queries, key_up, tables)


def plain_absorbed_queries(
    queries: Tensor, key_up: Tensor, tables: tuple[Tensor, Tensor]
) -> Tensor:
    """`absorbed_queries` in plain torch, on any device: the kernel's oracle."""
    straight_dim = key_up.shape[1]
    turned = rotate(queries[..., straight_dim:], *tables)
    return torch.cat((_by_head(queries[..., :straight_dim], key_up), turned), dim=-1)


def expanded_values(attended: Tensor, value_up: Tensor) -> Tensor:
    """Returns `[T, H, V]` of what latent vectors `[T, H, L]` are as values, by `value_up`
    `[H, V, L]`."""
    if runs_triton(attended):
        from shared.kernels.latent_triton import fused_head_products

        return fused_head_products(attended, value_up, None, is_transposed=False)
    return plain_expanded_values(attended, value_up)


def plain_expanded_values(attended: Tensor, value_up: Tensor) -> Tensor:
    """`expanded_values` in plain torch, on any device: the kernel's oracle."""
    return _by_head(attended, value_up.transpose(1, 2))


def _by_head(rows: Tensor, matrices: Tensor) -> Tensor:
    """Returns the product `[T, H, M]` of each head's rows `[T, H, K]` with its own matrix,
    `[H, K, M]`."""
    by_head = F.pad(rows.transpose(0, 1), (0, 0, 0, -len(rows) % _ROW_MULTIPLE))
    return torch.bmm(by_head, matrices)[:, : len(rows)].transpose(0, 1)
