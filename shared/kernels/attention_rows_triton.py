"""Launches the kernels of `attention_rows_jit`: paged attention of single rows on CUDA."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from shared.kernels.attention_rows import RowPlan
from shared.kernels.attention_rows_jit import attend_rows, join_spans
from shared.kernels.launch import empties

# Keys of a span; one program sums over them.
SPAN = 512
_HEADS = 16
_MIN_DIMS = 16
_TILE, _WIDE_TILE = 64, 32
_WIDE_DIM = 256
# From this many rows on, one program for each row and block of heads is enough to fill the device.
_MANY_ROWS = 64


def row_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: RowPlan,
    *,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attends as `paged_attention` does, with its arguments and result."""
    num_rows, num_heads, dim = queries.shape
    num_kv_heads, batch = keys.shape[1], plan.batch
    assert keys.is_contiguous()
    assert values.is_contiguous()
    queries = queries.contiguous()
    main = 1 << (dim.bit_length() - 1)
    block_main = max(main, _MIN_DIMS)
    rest = 0 if main == dim else max(triton.next_power_of_2(dim - main), _MIN_DIMS)
    block_values = max(triton.next_power_of_2(dim), _MIN_DIMS)
    num_groups = num_heads // num_kv_heads
    num_spans = triton.cdiv(max(batch.max_kv_length, 1), SPAN)
    is_whole = num_rows >= _MANY_ROWS or num_spans == 1
    results = queries.new_empty((num_rows, num_heads, dim))
    sums = highs = masses = results
    if not is_whole:
        shape = (num_rows, num_heads, num_spans)
        sums = queries.new_empty((*shape, dim), dtype=torch.float32)
        highs, masses = empties(2, shape, torch.float32, sums.device)
    tail = plan.tail_slots
    log2_scale = scale * math.log2(math.e)
    sink_scores = queries if sinks is None else sinks
    blocks = num_kv_heads * triton.cdiv(num_groups, _HEADS)
    attend_rows[(num_rows, blocks, 1 if is_whole else num_spans)](
        queries, keys, values, sink_scores, results, sums, highs, masses,
        plan.sequences, plan.row_lengths, plan.positions, plan.shared_lengths,
        batch.page_table, batch.page_table if tail is None else tail,
        queries.stride(0), batch.page_table.stride(0), 0 if tail is None else tail.stride(0),
        num_spans, log2_scale,
        1.0 if cap is None else cap * math.log2(math.e), plan.sliding_window or 0,
        HAS_TAIL=tail is not None, HAS_CAP=cap is not None,
        HAS_WINDOW=plan.sliding_window is not None, HAS_SINKS=sinks is not None,
        IS_WHOLE=is_whole, NUM_KV_HEADS=num_kv_heads,
        NUM_GROUPS=num_groups, HEADS=_HEADS, DIM=dim, MAIN=main, REST=rest,
        BLOCK_MAIN=block_main, BLOCK_VALUES=block_values,
        PAGE_SIZE=batch.page_size, SPAN=SPAN,
        TILE=_TILE if dim < _WIDE_DIM else _WIDE_TILE,
        IS_FLOAT32=queries.dtype is torch.float32,
        num_warps=4 if dim < _WIDE_DIM else 8, num_stages=2,
    )  # fmt: skip
    if not is_whole:
        join_spans[(num_rows, num_heads)](
            sums, highs, masses, sink_scores, plan.row_lengths, results, num_spans,
            HAS_SINKS=sinks is not None, NUM_HEADS=num_heads, DIM=dim,
            BLOCK_VALUES=block_values, SPAN=SPAN, num_warps=1,
        )  # fmt: skip
    return results
