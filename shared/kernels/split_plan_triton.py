"""Launches the kernels of `split_plan_jit`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.kernels.paged_rows import PagedRows
from shared.kernels.split_plan_jit import plan_blocks, plan_rows


def rows_on_device(batch: PagedRows) -> tuple[Tensor, Tensor | None]:
    """Returns the lengths of all rows `[T]` int32, and the slots of their tail keys `[T, W]`."""
    num_rows, mask = len(batch.positions), batch.tail_mask
    lengths = torch.empty(num_rows, dtype=torch.int32, device=batch.positions.device)
    slots = None if mask is None else mask.new_empty(mask.shape, dtype=torch.int64)
    width = 1 if mask is None else mask.shape[1]
    assert mask is None or mask.is_contiguous()
    plan_rows[(num_rows,)](
        batch.query_starts, batch.kv_lengths, batch.prefix_lengths, batch.is_causal,
        batch.page_table, batch.is_causal if mask is None else mask,
        lengths, lengths if slots is None else slots,
        len(batch.kv_lengths), batch.page_table.stride(0), width,
        PAGE_SIZE=batch.page_size, HAS_TAIL=mask is not None,
        BLOCK_SEQUENCES=triton.next_power_of_2(len(batch.kv_lengths)),
        BLOCK_WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return lengths, slots


def blocks_on_device(
    batch: PagedRows, *, rows_per_block: int, max_blocks: int, max_plain_rows: int,
    has_chunks: bool, of_chunks: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns sequence, first row and row count of each block, `[max_blocks]` int32 each."""
    shape, device = (3, max_blocks), batch.positions.device
    sequences, first_rows, counts = torch.empty(shape, dtype=torch.int32, device=device).unbind()
    plan_blocks[(max_blocks,)](
        batch.query_starts, batch.is_causal, sequences, first_rows, counts, len(batch.kv_lengths),
        ROWS=rows_per_block, MAX_PLAIN_ROWS=max_plain_rows,
        HAS_CHUNKS=has_chunks, OF_CHUNKS=of_chunks,
        BLOCK_SEQUENCES=triton.next_power_of_2(len(batch.kv_lengths)), num_warps=4,
    )  # fmt: skip
    return sequences, first_rows, counts
