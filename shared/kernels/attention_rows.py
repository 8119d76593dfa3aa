"""Plan of paged attention over single rows, computed once a forward; see `attention_rows_jit`.

The plan of prompt attention, computed once a forward; see `attention_prompts_triton`.
"""

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
    most_plain_rows,
    plain_blocks,
    plain_rows,
    sequence_of_rows,
)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompts of a forward: causal runs of many rows.

    Attributes:
        blocks: of their rows.
        row_lengths: `[T]` int32, keys each row of the forward sees before the window.
        key_starts: `[B]` int64, where the keys of each prompt begin in `key_slots`.
        key_slots: `[S]` int64, the slots of all keys of all prompts, one prompt after the other.
    """

    blocks: RowBlocks
    row_lengths: Tensor
    key_starts: Tensor
    key_slots: Tensor


def has_prompts(batch: PagedRows) -> bool:
    """Whether the host knows of prompts among the rows."""
    return batch.max_query_length > MAX_PLAIN_ROWS and batch.num_prompt_keys > 0


def is_prompt(batch: PagedRows) -> Tensor:
    """Returns `[B]` bool."""
    num_rows = batch.query_starts[1:] - batch.query_starts[:-1]
    return batch.is_causal & (num_rows > MAX_PLAIN_ROWS)


def rows_beside_prompts(batch: PagedRows) -> Tensor:
    """Returns `[R]` int64, the rows of a forward of T that are no prompt's; T where there are
    fewer than there may be."""
    num_rows, most = len(batch.positions), most_plain_rows(batch)
    every = torch.arange(num_rows, device=batch.positions.device)
    is_own = ~is_prompt(batch)[sequence_of_rows(batch)] & (every < batch.query_starts[-1])
    # Rows of prompts all go to one more place, which is cut off.
    places = torch.where(is_own, is_own.cumsum(0) - 1, most)
    rows = torch.full((most + 1,), num_rows, device=is_own.device)
    return rows.scatter_(0, places, every)[:most]


def plan_prompts(batch: PagedRows, row_lengths: Tensor, num_query_groups: int) -> PromptPlan:
    """Computes the plan without waiting for the device."""
    taken = is_prompt(batch)
    num_rows = (batch.query_starts[1:] - batch.query_starts[:-1]) * taken
    cut = cut_of(batch, CHUNK_TILE, num_query_groups, len(batch.positions))
    ends = (batch.kv_lengths * taken).cumsum(0)
    starts = ends - batch.kv_lengths * taken
    keys = torch.arange(batch.num_prompt_keys, device=ends.device)
    # Fewer keys may be there than the host counts: some are in another process.
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
    """The R rows of a forward of T that are no prompt's; each sees its keys as one list in path
    order, see `split_plan`.

    Attributes:
        batch: as it came.
        rows: `[R]` int64, their places among the T, or T for nobody; None takes all of them.
        row_lengths: `[R]` int32, keys each row sees before the window; 0 for padding rows.
        shared_lengths: `[B]` int32, how many of them come from the page table.
        tail_slots: `[R, W]` int64, slots of the others; None without trees.
        prompts: the other rows; None where there are none.
    """

    batch: PagedRows
    rows: Tensor | None
    row_lengths: Tensor
    shared_lengths: Tensor
    tail_slots: Tensor | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan(RowsOfBatch):
    """Rows that are computed one by one.

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
    rows = rows_beside_prompts(batch)
    taken = rows.clamp(max=num_rows - 1)
    return RowPlan(
        batch=batch,
        rows=rows,
        sequences=whole.sequences[taken],
        positions=whole.positions[taken],
        row_lengths=whole.row_lengths[taken].masked_fill(rows == num_rows, 0),
        shared_lengths=whole.shared_lengths,
        tail_slots=None if tail is None else tail[taken],
        sliding_window=whole.sliding_window,
        prompts=plan_prompts(batch, whole.row_lengths, num_query_groups),
    )
