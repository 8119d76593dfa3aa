"""The steps around latent attention: cache writes, and each head's own products. One fused kernel
each on CUDA, plain torch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.attention_rows import (
    RowsOfBatch,
    has_prompts,
    is_prompt,
    plan_prompts,
    rows_without_prompts,
)
from shared.kernels.cache import store
from shared.kernels.kernel_settings import dispatched
from shared.kernels.pointwise import Norm, Partials, plain_rms_norm, rotate, total_of
from shared.kernels.split_plan import (
    BlockCut,
    PagedRows,
    RowBlocks,
    max_blocks_of,
    parts_of_rows,
    plain_blocks,
    plain_rows,
)

# Measured with MKL: a row of a product has the same bits for every multiple of 8 rows.
_ROW_MULTIPLE = 8


@dispatched("latent_triton")
def enter(
    projected: Tensor | Partials,
    query_norm: Norm | None,
    latent_norm: Norm,
    tables: tuple[Tensor, Tensor],
    cache: Tensor,
    slots: Tensor,
) -> Tensor | None:
    """Writes normed latent vectors and rotated keys to the cache.

    Args:
        projected: `[T, Q + L + R]`: queries, latent vectors, keys.
        query_norm: weight `[Q]` and eps; None does not norm the queries.
        latent_norm: weight `[L]` and eps.
        tables: cosine and signed sine, `[T, 1, R]` float32.
        cache: `[num_slots, 1, L + R]`; written in place.
        slots: `[T]` int64, slot of each row; only padding rows may share a slot.

    Returns:
        The normed queries `[T, Q]`; None without `query_norm`.
    """
    projected = total_of(projected)
    latent_dim, rotary_dim = len(latent_norm[0]), tables[0].shape[-1]
    first_latent = projected.shape[1] - latent_dim - rotary_dim
    queries, first_key = projected[:, :first_latent], first_latent + latent_dim
    latents, keys = projected[:, first_latent:first_key], projected[:, first_key:]
    rotated = rotate(keys.unsqueeze(1), *tables)
    normed = plain_rms_norm(latents, *latent_norm).unsqueeze(1)
    store(cache, slots, torch.cat((normed, rotated), dim=-1), None)
    return None if query_norm is None else plain_rms_norm(queries, *query_norm)


@dispatched("latent_triton")
def absorbed_queries(queries: Tensor, key_up: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Returns `[T, H, L + R]` for queries `[T, H, N + R]`: the first N dimensions are multiplied by
    `key_up` `[H, N, L]`, which is then not applied to keys, and the last R are rotated.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
    """
    unrotated_dim = key_up.shape[1]
    rotated = rotate(queries[..., unrotated_dim:], *tables)
    return torch.cat((_by_head(queries[..., :unrotated_dim], key_up), rotated), dim=-1)


@dispatched("latent_triton")
def expanded_values(attended: Tensor, value_up: Tensor) -> Tensor:
    """Expands attended latent vectors `[T, H, L]` to values `[T, H, V]` with `value_up`
    `[H, V, L]`."""
    return _by_head(attended, value_up.transpose(1, 2))


def _by_head(rows: Tensor, matrices: Tensor) -> Tensor:
    """Returns the product `[T, H, M]` of each head's rows `[T, H, K]` with its own matrix,
    `[H, K, M]`."""
    by_head = F.pad(rows.transpose(0, 1), (0, 0, 0, -len(rows) % _ROW_MULTIPLE))
    return torch.bmm(by_head, matrices)[:, : len(rows)].transpose(0, 1)


# Plan of latent attention, computed once per forward; see `latent_jit`.

# Rows times heads of a program: the tile of one warp group's matrix instructions.
_TILE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPlan(RowsOfBatch):
    """Attributes: blocks of the R rows."""

    blocks: RowBlocks


def block_heads(num_heads: int) -> int:
    """Returns the number of heads of a row that one program computes."""
    return min(_TILE_ROWS, 1 << (num_heads - 1).bit_length())


def plan_latents(batch: PagedRows, num_heads: int) -> LatentPlan:
    """Computes the plan without waiting for the device."""
    if has_prompts(batch):
        return _plan_with_prompts(batch, num_heads)
    num_rows = len(batch.positions)
    parts = parts_of_rows(batch, _cut(num_rows, len(batch.kv_lengths), num_heads))
    return LatentPlan(
        batch=batch,
        rows=None,
        row_lengths=parts.row_lengths,
        shared_lengths=parts.shared_lengths,
        tail_slots=parts.tail_slots,
        blocks=parts.plain_blocks,
        prompts=None,
    )


def _cut(num_rows: int, num_sequences: int, num_heads: int) -> BlockCut:
    rows_per_block = _TILE_ROWS // block_heads(num_heads)
    return BlockCut(
        rows_per_block, max_blocks_of(num_rows, num_sequences, rows_per_block), _TILE_ROWS
    )


def _plan_with_prompts(batch: PagedRows, num_heads: int) -> LatentPlan:
    num_rows, num_sequences = len(batch.positions), len(batch.kv_lengths)
    row_lengths, tail = plain_rows(batch)
    rows = rows_without_prompts(batch)
    index = rows.clamp(max=num_rows - 1)
    counts = (batch.query_starts[1:] - batch.query_starts[:-1]) * ~is_prompt(batch)
    starts = counts.cumsum(0, dtype=torch.int32) - counts
    return LatentPlan(
        batch=batch,
        rows=rows,
        row_lengths=row_lengths[index].masked_fill(rows == num_rows, 0),
        shared_lengths=torch.where(batch.is_causal, batch.kv_lengths, batch.prefix_lengths),
        tail_slots=None if tail is None else tail[index],
        blocks=plain_blocks(starts, counts, _cut(len(rows), num_sequences, num_heads)),
        # One query group: expanded, every head has its own keys.
        prompts=plan_prompts(batch, row_lengths, 1),
    )
