"""Plan of latent attention, computed once a forward; see `latent_jit`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.attention_rows import PromptPlan, has_prompts, is_prompt, plan_prompts
from shared.kernels.split_plan import (
    MAX_PLAIN_ROWS,
    BlockCut,
    PagedRows,
    RowBlocks,
    most_blocks,
    parts_of_rows,
    plain_blocks,
    plain_rows,
    sequence_of_rows,
)

# Rows times heads of a program: what one warp group's matrix instructions compute.
_LANES = 64


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The rows of a forward; each sees its keys as one list in path order, see `split_plan`.

    Attributes:
        batch: as it came.
        rows: `[R]` int64, those that are no prompt's, of T; T where there are fewer. None takes
            all, and R is T.
        row_lengths: `[R]` int32, keys each row sees; 0 for padding rows.
        shared_lengths: `[B]` int32, how many of them come from the page table.
        tail_slots: `[R, W]` int64, slots of the others; None without trees.
        blocks: of the R rows.
        prompts: the others; None where there are none.
    """

    batch: PagedRows
    rows: Tensor | None
    row_lengths: Tensor
    shared_lengths: Tensor
    tail_slots: Tensor | None
    blocks: RowBlocks
    prompts: PromptPlan | None

    def taken(self, rows: Tensor) -> Tensor:
        """Returns `[R, …]` of `[T, …]`."""
        if self.rows is None:
            return rows
        return rows.index_select(0, self.rows.clamp(max=len(rows) - 1))

    def results(self, queries: Tensor, dim: int) -> Tensor:
        """Returns room for `[T, H, dim]` and a row that nobody reads."""
        return queries.new_empty((len(queries) + 1, queries.shape[1], dim))

    def put(self, results: Tensor, own: Tensor) -> None:
        """Writes `[R, …]` to the rows of `results` `[T + 1, …]` that they are of."""
        assert self.rows is not None
        results.index_copy_(0, self.rows, own)


def block_heads(num_heads: int) -> int:
    """Returns the heads that a program takes of a row."""
    return min(_LANES, 1 << (num_heads - 1).bit_length())


def plan_latents(batch: PagedRows, num_heads: int) -> LatentPlan:
    """Computes the plan without waiting for the device."""
    if has_prompts(batch):
        return _plan_beside_prompts(batch, num_heads)
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
    rows_per_block = _LANES // block_heads(num_heads)
    return BlockCut(rows_per_block, most_blocks(num_rows, num_sequences, rows_per_block), _LANES)


def _plan_beside_prompts(batch: PagedRows, num_heads: int) -> LatentPlan:
    num_rows, num_sequences = len(batch.positions), len(batch.kv_lengths)
    most = num_rows
    if batch.tail_mask is None:
        most = min(num_rows, MAX_PLAIN_ROWS * num_sequences)
    row_lengths, tail = plain_rows(batch)
    own_sequences = ~is_prompt(batch)
    is_own = own_sequences[sequence_of_rows(batch)] & (row_lengths > 0)
    every = torch.arange(num_rows, device=is_own.device)
    # Rows of prompts all go to one more place, which is cut off.
    places = torch.where(is_own, is_own.cumsum(0) - 1, most)
    rows = torch.full((most + 1,), num_rows, device=is_own.device).scatter_(0, places, every)[:most]
    taken = rows.clamp(max=num_rows - 1)
    counts = (batch.query_starts[1:] - batch.query_starts[:-1]) * own_sequences
    starts = counts.cumsum(0, dtype=torch.int32) - counts
    return LatentPlan(
        batch=batch,
        rows=rows,
        row_lengths=row_lengths[taken].masked_fill(rows == num_rows, 0),
        shared_lengths=torch.where(batch.is_causal, batch.kv_lengths, batch.prefix_lengths),
        tail_slots=None if tail is None else tail[taken],
        blocks=plain_blocks(starts, counts, _cut(most, num_sequences, num_heads)),
        # Expanded, every head has keys of its own.
        prompts=plan_prompts(batch, row_lengths, 1),
    )
