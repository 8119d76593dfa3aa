"""What paged attention of single rows needs of a batch, computed once a forward; see
`attention_rows_jit`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.paged_rows import PagedRows
from shared.kernels.split_plan import plain_rows, sequence_of_rows


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of a forward; each sees its keys as one list in path order, see `split_plan`.

    Attributes:
        batch: as it came.
        sequences: `[T]` int64, the sequence of each row.
        row_lengths: `[T]` int32, keys each row sees before the window; 0 for padding rows.
        shared_lengths: `[B]` int32, how many of them come from the page table.
        tail_slots: `[T, W]` int64, slots of the others; None without trees.
        sliding_window: see `plan_attention`.
    """

    batch: PagedRows
    sequences: Tensor
    row_lengths: Tensor
    shared_lengths: Tensor
    tail_slots: Tensor | None
    sliding_window: int | None


def plan_rows(batch: PagedRows, sliding_window: int | None) -> RowPlan:
    """Computes the plan without waiting for the device."""
    row_lengths, tail_slots = plain_rows(batch)
    return RowPlan(
        batch=batch,
        sequences=sequence_of_rows(batch),
        row_lengths=row_lengths,
        shared_lengths=torch.where(batch.is_causal, batch.kv_lengths, batch.prefix_lengths),
        tail_slots=tail_slots,
        sliding_window=sliding_window,
    )
