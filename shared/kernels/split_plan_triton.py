"""Triton kernels that compute the tensors of a `SplitPlan`; see `split_plan`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_jit import begin
from shared.kernels.launch import dependent_launch, empties
from shared.kernels.split_plan import (
    MAX_KV_HEADS,
    MAX_PLAIN_ROWS,
    BlockCut,
    PagedRows,
    PlanParts,
    RowBlocks,
)

_MIN_LOADED = 64


@triton.jit(do_not_specialize=[  # type: ignore[untyped-decorator]
    "num_rows", "num_blocks", "num_sequences", "page_stride", "tail_width",
])  # fmt: skip
def plan_all(  # type: ignore[no-untyped-def]
    query_starts, kv_lengths, prefix_lengths, is_causal, page_table, tail_mask,
    row_lengths, shared_lengths, tail_slots, counters, block_sequences, first_rows, counts,
    num_rows, num_blocks, num_sequences, page_stride, tail_width,
    PAGE_SIZE: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, MAX_PLAIN_ROWS: tl.constexpr, NUM_COUNTERS: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr, BLOCK_WIDTH: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Plans the row, the sequence and the plain block with the program's index, if they exist.

    Writes a row's length and the slots of its visible tail keys; the number of keys that a
    sequence's rows share; a block's rows and NUM_COUNTERS zeros.
    """
    begin(IS_DEPENDENT)
    place = tl.program_id(0)
    if place < num_blocks:
        plan_block(
            query_starts, is_causal, block_sequences, first_rows, counts, place, num_sequences,
            ROWS, MAX_PLAIN_ROWS, HAS_CHUNKS, False, BLOCK_SEQUENCES,
        )  # fmt: skip
        counter = tl.arange(0, NUM_COUNTERS)
        tl.store(counters + place * NUM_COUNTERS + counter, counter * 0)
    if place < num_sequences:
        prefix = tl.load(prefix_lengths + place)
        whole = tl.load(kv_lengths + place)
        # Causal rows see different numbers of keys, but each key at the same position.
        is_shared = tl.load(is_causal + place) != 0
        tl.store(shared_lengths + place, tl.where(is_shared, whole, prefix))
    if place < num_rows:
        plan_row(
            query_starts, kv_lengths, prefix_lengths, is_causal, page_table, tail_mask,
            row_lengths, tail_slots, place, num_sequences, page_stride, tail_width,
            PAGE_SIZE, HAS_TAIL, BLOCK_SEQUENCES, BLOCK_WIDTH,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def plan_row(  # type: ignore[no-untyped-def]
    query_starts, kv_lengths, prefix_lengths, is_causal, page_table, tail_mask,
    row_lengths, tail_slots, row, num_sequences, page_stride, tail_width,
    PAGE_SIZE: tl.constexpr, HAS_TAIL: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes one row's length and the slots of its visible tail keys."""
    sequences = tl.arange(0, BLOCK_SEQUENCES)
    is_sequence = sequences < num_sequences
    ends = tl.load(query_starts + 1 + sequences, mask=is_sequence, other=0)
    sequence = tl.sum((is_sequence & (ends <= row)).to(tl.int32), 0)
    if sequence >= num_sequences:
        tl.store(row_lengths + row, 0)
    else:
        prefix = tl.load(prefix_lengths + sequence)
        end = tl.load(query_starts + 1 + sequence)
        length = tl.maximum(tl.load(kv_lengths + sequence) - end + row + 1, prefix)
        if HAS_TAIL:
            if tl.load(is_causal + sequence) == 0:
                columns = tl.arange(0, BLOCK_WIDTH)
                marks = tl.load(
                    tail_mask + row.to(tl.int64) * tail_width + columns,
                    mask=columns < tail_width, other=0,
                ).to(tl.int32)  # fmt: skip
                is_visible = marks != 0
                indices = prefix + columns
                page = tl.load(
                    page_table + sequence * page_stride + indices // PAGE_SIZE,
                    mask=is_visible, other=0,
                )  # fmt: skip
                slots = page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE
                places = tl.cumsum(marks, 0) - 1
                target = tail_slots + row.to(tl.int64) * tail_width + places
                tl.store(target, slots, mask=is_visible)
                length = prefix + tl.sum(marks, 0)
        tl.store(row_lengths + row, length)


@triton.jit(do_not_specialize=["num_sequences"])  # type: ignore[untyped-decorator]
def plan_chunks(  # type: ignore[no-untyped-def]
    query_starts, is_causal, block_sequences, first_rows, counts, num_sequences,
    ROWS: tl.constexpr, MAX_PLAIN_ROWS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Writes one block of the rows of chunks."""
    plan_block(
        query_starts, is_causal, block_sequences, first_rows, counts, tl.program_id(0),
        num_sequences, ROWS, MAX_PLAIN_ROWS, True, True, BLOCK_SEQUENCES,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def plan_block(  # type: ignore[no-untyped-def]
    query_starts, is_causal, block_sequences, first_rows, counts, block, num_sequences,
    ROWS: tl.constexpr, MAX_PLAIN_ROWS: tl.constexpr,
    HAS_CHUNKS: tl.constexpr, OF_CHUNKS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Writes one block of the plain rows, or of chunks; blocks past the last one are empty."""
    sequences = tl.arange(0, BLOCK_SEQUENCES)
    is_sequence = sequences < num_sequences
    starts = tl.load(query_starts + sequences, mask=is_sequence, other=0)
    num_rows = tl.load(query_starts + 1 + sequences, mask=is_sequence, other=0) - starts
    if HAS_CHUNKS:
        causal = tl.load(is_causal + sequences, mask=is_sequence, other=0) != 0
        is_chunk = causal & (num_rows > MAX_PLAIN_ROWS)
        num_rows = tl.where(is_chunk == OF_CHUNKS, num_rows, 0)
    num_blocks = (num_rows + ROWS - 1) // ROWS
    ends = tl.cumsum(num_blocks, 0)
    sequence = tl.sum((is_sequence & (ends <= block)).to(tl.int32), 0)
    is_own = sequences == sequence
    offset = (block - tl.sum(tl.where(is_own, ends - num_blocks, 0), 0)) * ROWS
    count = tl.minimum(tl.sum(tl.where(is_own, num_rows, 0), 0) - offset, ROWS)
    tl.store(block_sequences + block, tl.where(sequence < num_sequences, sequence, 0))
    tl.store(first_rows + block, tl.sum(tl.where(is_own, starts, 0), 0) + offset)
    tl.store(counts + block, tl.where(sequence < num_sequences, count, 0))


def fused_parts_of_rows(
    batch: PagedRows, plain_cut: BlockCut, chunk_cut: BlockCut | None = None
) -> PlanParts:
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
    """Returns the block size with which a program loads `count` elements; there are few sizes,
    because each is compiled."""
    return max(int(triton.next_power_of_2(count)), _MIN_LOADED)
