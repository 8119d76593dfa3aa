"""Plan of paged attention over single rows, computed once a forward; see `attention_rows_jit`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.attention_prompts import PromptPlan, has_prompts, is_prompt, plan_prompts
from shared.kernels.paged_rows import PagedRows
from shared.kernels.split_plan import MAX_PLAIN_ROWS, plain_rows, sequence_of_rows


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of a forward; each sees its keys as one list in path order, see `split_plan`.

    Attributes:
        batch: as it came.
        rows: `[R]` int64, those that are no prompt's, of T; T where there are fewer. None takes
            all, and R is T.
        sequences: `[R]` int64, the sequence of each row.
        positions: `[R]` int64.
        row_lengths: `[R]` int32, keys each row sees before the window; 0 for padding rows.
        shared_lengths: `[B]` int32, how many of them come from the page table.
        tail_slots: `[R, W]` int64, slots of the others; None without trees.
        sliding_window: see `plan_attention`.
        prompts: the others; None where there are none.
    """

    batch: PagedRows
    rows: Tensor | None
    sequences: Tensor
    positions: Tensor
    row_lengths: Tensor
    shared_lengths: Tensor
    tail_slots: Tensor | None
    sliding_window: int | None
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
        """Writes `[R, H, dim]` to the rows of `results` that they are of."""
        assert self.rows is not None
        results.index_copy_(0, self.rows, own)


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
    batch, num_rows = whole.batch, len(whole.sequences)
    most = num_rows
    if batch.tail_mask is None:
        most = min(num_rows, MAX_PLAIN_ROWS * len(batch.kv_lengths))
    is_own = ~is_prompt(batch)[whole.sequences]
    every = torch.arange(num_rows, device=is_own.device)
    # Rows of prompts all go to one more place, which is cut off.
    places = torch.where(is_own, is_own.cumsum(0) - 1, most)
    rows = torch.full((most + 1,), num_rows, device=is_own.device).scatter_(0, places, every)[:most]
    taken = rows.clamp(max=num_rows - 1)
    tail = whole.tail_slots
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
