"""Launches the kernels of `split_plan_jit`."""

from __future__ import annotations

import torch
import triton

from shared.kernels.dependent import dependent_launch
from shared.kernels.empties import empties
from shared.kernels.paged_rows import PagedRows
from shared.kernels.split_plan import (
    MAX_KV_HEADS,
    MAX_PLAIN_ROWS,
    BlockCut,
    PlanParts,
    RowBlocks,
)
from shared.kernels.split_plan_jit import plan_all, plan_chunks

_FEWEST_LOADED = 64


def parts_on_device(batch: PagedRows, plain_cut: BlockCut, chunk_cut: BlockCut | None) -> PlanParts:
    """Computes what `plain_parts` computes; where there are no chunks in one launch."""
    num_rows, num_sequences = len(batch.positions), len(batch.kv_lengths)
    mask, blocks = batch.tail_mask, _room_for(batch, plain_cut)
    row_lengths = batch.kv_lengths.new_empty(num_rows)
    shared_lengths = batch.kv_lengths.new_empty(num_sequences)
    counters = batch.kv_lengths.new_empty(MAX_KV_HEADS * plain_cut.max_blocks)
    tail_slots = None if mask is None else mask.new_empty(mask.shape, dtype=torch.int64)
    width = 1 if mask is None else mask.shape[1]
    assert mask is None or mask.is_contiguous()
    plan_all[(max(num_rows, plain_cut.max_blocks, num_sequences),)](
        batch.query_starts, batch.kv_lengths, batch.prefix_lengths, batch.is_causal,
        batch.page_table, batch.is_causal if mask is None else mask,
        row_lengths, shared_lengths, row_lengths if tail_slots is None else tail_slots,
        counters, blocks.sequences, blocks.first_rows, blocks.counts,
        num_rows, plain_cut.max_blocks, num_sequences, batch.page_table.stride(0), width,
        PAGE_SIZE=batch.page_size, HAS_TAIL=mask is not None, HAS_CHUNKS=chunk_cut is not None,
        ROWS=plain_cut.rows_per_block, MAX_PLAIN_ROWS=MAX_PLAIN_ROWS, NUM_COUNTERS=MAX_KV_HEADS,
        BLOCK_SEQUENCES=_block_of(num_sequences), BLOCK_WIDTH=_block_of(width), num_warps=4,
        **dependent_launch(batch.positions.device, num_rows),
    )  # fmt: skip
    chunks = None if chunk_cut is None else _chunk_blocks(batch, chunk_cut)
    return PlanParts(row_lengths, shared_lengths, tail_slots, counters, blocks, chunks)


def _chunk_blocks(batch: PagedRows, cut: BlockCut) -> RowBlocks:
    blocks, num_sequences = _room_for(batch, cut), len(batch.kv_lengths)
    plan_chunks[(cut.max_blocks,)](
        batch.query_starts, batch.is_causal, blocks.sequences, blocks.first_rows, blocks.counts,
        num_sequences, ROWS=cut.rows_per_block, MAX_PLAIN_ROWS=MAX_PLAIN_ROWS,
        BLOCK_SEQUENCES=_block_of(num_sequences), num_warps=4,
    )  # fmt: skip
    return blocks


def _room_for(batch: PagedRows, cut: BlockCut) -> RowBlocks:
    parts = empties(3, (cut.max_blocks,), torch.int32, batch.positions.device)
    sequences, first_rows, counts = parts
    return RowBlocks(sequences, first_rows, counts, cut.tile)


def _block_of(count: int) -> int:
    """Returns how many elements a program loads of so many: few sizes, as each is compiled."""
    return max(int(triton.next_power_of_2(count)), _FEWEST_LOADED)
