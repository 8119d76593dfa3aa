"""Plans of attention over single rows, see `attention_rows_jit`, and over prompts, see
`attention_prompts_triton`; computed once per forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.split_plan import (
    CHUNK_TILE,
    MAX_PLAIN_ROWS,
    PagedRows,
    RowBlocks,
    cut_of,
    max_plain_rows,
    plain_blocks,
    plain_rows,
    sequence_of_rows,
)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompts of a forward: causal runs of many rows.

    Attributes:
        row_lengths: `[T]` int32, keys that each row of the forward sees, ignoring the window.
        key_starts: `[B]` int64, index in `key_slots` of each prompt's first key.
        key_slots: `[S]` int64, the slots of all keys of all prompts, one prompt after the other.
    """

    blocks: RowBlocks
    row_lengths: Tensor
    key_starts: Tensor
    key_slots: Tensor


def has_prompts(batch: PagedRows) -> bool:
    """Whether the host knows that some rows are prompts."""
    return batch.max_query_length > MAX_PLAIN_ROWS and batch.num_prompt_keys > 0


def is_prompt(batch: PagedRows) -> Tensor:
    """Returns `[B]` bool, whether each sequence is a prompt."""
    num_rows = batch.query_starts[1:] - batch.query_starts[:-1]
    return batch.is_causal & (num_rows > MAX_PLAIN_ROWS)


def rows_without_prompts(batch: PagedRows) -> Tensor:
    """Returns `[R]` int64, the rows that belong to no prompt, of a forward of T rows; padded with T
    to the largest possible number."""
    num_rows, max_rows = len(batch.positions), max_plain_rows(batch)
    all_rows = torch.arange(num_rows, device=batch.positions.device)
    is_plain = ~is_prompt(batch)[sequence_of_rows(batch)] & (all_rows < batch.query_starts[-1])
    # The rows of prompts all go to one extra element, which is dropped.
    places = torch.where(is_plain, is_plain.cumsum(0) - 1, max_rows)
    rows = torch.full((max_rows + 1,), num_rows, device=is_plain.device)
    return rows.scatter_(0, places, all_rows)[:max_rows]


def plan_prompts(batch: PagedRows, row_lengths: Tensor, num_query_groups: int) -> PromptPlan:
    """Computes the plan without waiting for the device."""
    are_prompts = is_prompt(batch)
    num_rows = (batch.query_starts[1:] - batch.query_starts[:-1]) * are_prompts
    cut = cut_of(batch, CHUNK_TILE, num_query_groups, len(batch.positions))
    ends = (batch.kv_lengths * are_prompts).cumsum(0)
    starts = ends - batch.kv_lengths * are_prompts
    keys = torch.arange(batch.num_prompt_keys, device=ends.device)
    # There may be fewer keys than the host counts, which includes those of other processes.
    sequences = torch.bucketize(keys, ends, right=True).clamp_(max=len(ends) - 1)
    indices = keys - starts[sequences]
    columns = (indices // batch.page_size).clamp_(max=batch.page_table.shape[1] - 1)
    pages = batch.page_table[sequences, columns].long()
    return PromptPlan(
        blocks=plain_blocks(batch.query_starts, num_rows, cut),
        row_lengths=row_lengths,
        key_starts=starts,
        key_slots=pages * batch.page_size + indices % batch.page_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOfBatch:
    """The R rows that belong to no prompt, of a forward of T rows. Each row sees its keys as one
    list in path order, see `split_plan`.

    Attributes:
        rows: `[R]` int64, indices among the T rows, or T for padding; None where R = T.
        row_lengths: `[R]` int32, keys each row sees, ignoring the window; 0 for padding rows.
        shared_lengths: `[B]` int32, how many of these keys come from the page table.
        tail_slots: `[R, W]` int64, slots of the other keys; None without trees.
    """

    batch: PagedRows
    rows: Tensor | None
    row_lengths: Tensor
    shared_lengths: Tensor
    tail_slots: Tensor | None
    prompts: PromptPlan | None

    def select(self, rows: Tensor) -> Tensor:
        """Returns the R rows `[R, …]` of `[T, …]`."""
        if self.rows is None:
            return rows
        return rows.index_select(0, self.rows.clamp(max=len(rows) - 1))

    def results(self, queries: Tensor, dim: int) -> Tensor:
        """Allocates results `[T + 1, H, dim]`; the last row takes padding and is never read."""
        return queries.new_empty((len(queries) + 1, queries.shape[1], dim))

    def scatter_into(self, results: Tensor, attended: Tensor) -> None:
        """Writes `attended` `[R, …]` to these rows of `results` `[T + 1, …]`."""
        assert self.rows is not None
        results.index_copy_(0, self.rows, attended)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan(RowsOfBatch):
    """Plan of the kernels that compute rows one by one.

    Attributes:
        sequences: `[R]` int64, the sequence of each row.
        positions: `[R]` int64.
        sliding_window: see `plan_attention`.
    """

    sequences: Tensor
    positions: Tensor
    sliding_window: int | None


def plan_rows(batch: PagedRows, sliding_window: int | None, num_query_groups: int) -> RowPlan:
    """Computes the plan without waiting for the device; arguments as in `plan_attention`."""
    row_lengths, tail_slots = plain_rows(batch)
    whole = RowPlan(
        batch=batch,
        rows=None,
        sequences=sequence_of_rows(batch),
        positions=batch.positions,
        row_lengths=row_lengths,
        shared_lengths=torch.where(batch.is_causal, batch.kv_lengths, batch.prefix_lengths),
        tail_slots=tail_slots,
        sliding_window=sliding_window,
        prompts=None,
    )
    return _without_prompts(whole, num_query_groups) if has_prompts(batch) else whole


def _without_prompts(whole: RowPlan, num_query_groups: int) -> RowPlan:
    batch, num_rows, tail = whole.batch, len(whole.sequences), whole.tail_slots
    rows = rows_without_prompts(batch)
    index = rows.clamp(max=num_rows - 1)
    return RowPlan(
        batch=batch,
        rows=rows,
        sequences=whole.sequences[index],
        positions=whole.positions[index],
        row_lengths=whole.row_lengths[index].masked_fill(rows == num_rows, 0),
        shared_lengths=whole.shared_lengths,
        tail_slots=None if tail is None else tail[index],
        sliding_window=whole.sliding_window,
        prompts=plan_prompts(batch, whole.row_lengths, num_query_groups),
    )
