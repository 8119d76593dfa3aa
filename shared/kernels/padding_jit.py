"""Triton kernel that copies a batch into the fixed tensors of a CUDA graph."""

from __future__ import annotations

import triton
import triton.language as tl

# These sizes change from step to step; compiling a kernel for each value would stall the engine.
_SIZES = (
    "num_rows", "num_logit_rows", "num_sequences", "num_pages", "tail_width",
    "bucket_rows", "bucket_sequences", "bucket_pages", "bucket_width",
)  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def pad_batch(  # type: ignore[no-untyped-def]
    token_ids, positions, slots, logit_rows,
    query_starts, kv_lengths, prefix_lengths, is_causal, page_table, tail_mask,
    to_token_ids, to_positions, to_slots, to_logit_rows,
    to_query_starts, to_kv_lengths, to_prefix_lengths, to_is_causal, to_page_table, to_tail_mask,
    num_rows, num_logit_rows, num_sequences, num_pages, tail_width,
    bucket_rows, bucket_sequences, bucket_pages, bucket_width,
    HAS_TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes one row and one sequence of the bucket, the graph's batch of fixed size.

    Padding rows compute token 0 in slot 0 of the padding page and belong to no sequence; padding
    sequences have no rows.
    """
    index = tl.program_id(0)
    if index < bucket_rows:
        is_row = index < num_rows
        tl.store(to_token_ids + index, tl.load(token_ids + index, mask=is_row, other=0))
        tl.store(to_positions + index, tl.load(positions + index, mask=is_row, other=0))
        tl.store(to_slots + index, tl.load(slots + index, mask=is_row, other=0))
        is_logit_row = index < num_logit_rows
        row = tl.load(logit_rows + index, mask=is_logit_row, other=0)
        tl.store(to_logit_rows + index, row)
        if HAS_TAIL:
            for first in range(0, bucket_width, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                marks = tl.load(
                    tail_mask + index * tail_width + columns,
                    mask=is_row & (columns < tail_width), other=0,
                )  # fmt: skip
                target = to_tail_mask + index * bucket_width + columns
                tl.store(target, marks, mask=columns < bucket_width)
    if index <= bucket_sequences:
        is_start = index <= num_sequences
        start = tl.load(query_starts + index, mask=is_start, other=0)
        tl.store(to_query_starts + index, tl.where(is_start, start, num_rows))
    if index < bucket_sequences:
        is_sequence = index < num_sequences
        kv_length = tl.load(kv_lengths + index, mask=is_sequence, other=0)
        tl.store(to_kv_lengths + index, kv_length)
        prefix = tl.load(prefix_lengths + index, mask=is_sequence, other=0)
        tl.store(to_prefix_lengths + index, prefix)
        tl.store(to_is_causal + index, tl.load(is_causal + index, mask=is_sequence, other=1))
        # Columns past the sequence's own pages keep values of earlier steps; they are never read.
        for first in range(0, num_pages, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            is_page = is_sequence & (columns < num_pages)
            pages = tl.load(page_table + index * num_pages + columns, mask=is_page, other=0)
            tl.store(to_page_table + index * bucket_pages + columns, pages, mask=is_page)
