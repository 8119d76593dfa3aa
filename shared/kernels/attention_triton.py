"""Launches paged attention on CUDA; the kernels are in `attention_jit`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shared.kernels.attention_jit import attend_chunk, attend_splits, combine
from shared.kernels.dependent import dependent_launch
from shared.kernels.narrow_cache import CacheScales
from shared.kernels.split_plan import (
    FIRST_SPLIT_KEYS,
    SPLITS_PER_LEVEL,
    RowBlocks,
    SplitPlan,
)

# About eight programs a multiprocessor; more would only find nothing to do.
_TARGET_PROGRAMS = 1024
_MIN_SPLIT_PROGRAMS = 8
# Above the end of any split.
_ALL_SHARED = 2**30
_TILE_KEYS = 64
# Where one head of a key is this wide, a chunk's tile holds fewer keys, or shared memory overflows.
_WIDE_TILE_KEYS = 32
_WIDE_BYTES = 512


def split_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: SplitPlan,
    *,
    scale: float,
    cache_scales: CacheScales | None,
) -> Tensor:
    """Attends as `paged_attention` does; arguments and result are its own.

    Results of padding rows are undefined.
    """
    assert queries.stride(2) == 1
    assert queries.stride(1) == queries.shape[2]
    assert keys.is_contiguous()
    assert values.is_contiguous()
    results = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if cache_scales is not None:
        keys, values = keys.view(torch.int8), values.view(torch.int8)
    scale_log2 = scale * math.log2(math.e)
    call = _Call(queries, keys, values, results, plan, scale_log2, cache_scales)
    _launch_splits(call)
    if plan.chunk_blocks is not None:
        _launch_chunks(call, plan.chunk_blocks)
    return results


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one attention call.

    Attributes:
        keys: of an e4m3 cache its bytes, and so are the values.
        scale_log2: brings scores to base 2, whose exponential the hardware has.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    results: Tensor
    plan: SplitPlan
    scale_log2: float
    cache_scales: CacheScales | None

    @property
    def scale_pointers(self) -> tuple[Tensor, Tensor]:
        """Factors of keys and values; any tensor where no kernel reads them."""
        scales = self.cache_scales
        return (self.keys, self.values) if scales is None else (scales.keys, scales.values)

    @property
    def num_groups(self) -> int:
        return self.queries.shape[1] // self.keys.shape[1]

    @property
    def head_bytes(self) -> int:
        return self.queries.shape[2] * self.queries.element_size()

    @property
    def num_stages(self) -> int:
        """Tiles of keys and values that are under way at once, as far as shared memory holds."""
        return 2 if self.head_bytes <= _WIDE_BYTES else 1

    def shape_options(self) -> dict[str, int | bool]:
        """Returns the compile-time constants that both kernels share."""
        head_dim = self.queries.shape[2]
        return {
            "NUM_KV_HEADS": self.keys.shape[1],
            "NUM_GROUPS": self.num_groups,
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": max(16, triton.next_power_of_2(head_dim)),
            "PAGE_SIZE": self.plan.page_size,
            "HAS_WINDOW": self.plan.sliding_window is not None,
            "IS_E4M3": self.cache_scales is not None,
        }


def _launch_splits(call: _Call) -> None:
    queries, plan, blocks = call.queries, call.plan, call.plan.plain_blocks
    num_rows, num_heads, head_dim = queries.shape
    num_blocks, num_kv_heads = len(blocks.counts), call.keys.shape[1]
    rows_per_block = blocks.tile // call.num_groups
    shape = (num_blocks * rows_per_block, num_heads, plan.max_splits)
    sums = queries.new_empty((*shape, head_dim), dtype=torch.float32)
    maxima = queries.new_empty(shape, dtype=torch.float32)
    masses = queries.new_empty(shape, dtype=torch.float32)
    wanted = -(-_TARGET_PROGRAMS // (num_blocks * num_kv_heads))
    split_programs = min(plan.max_splits, max(_MIN_SPLIT_PROGRAMS, wanted))
    own_programs = 0 if plan.tail_slots is None else rows_per_block
    tail = plan.page_table if plan.tail_slots is None else plan.tail_slots
    options, launch = call.shape_options(), dependent_launch(queries.device, num_rows)
    attend_splits[(num_kv_heads, num_blocks, split_programs + own_programs)](
        queries, call.keys, call.values, *call.scale_pointers, sums, maxima, masses,
        blocks.sequences, blocks.first_rows, blocks.counts,
        plan.row_lengths, plan.shared_lengths, plan.positions, plan.page_table, tail,
        queries.stride(0), plan.page_table.stride(0), tail.stride(0),
        plan.max_splits, split_programs,
        call.scale_log2, plan.sliding_window or 0,
        HAS_TAIL=plan.tail_slots is not None, ALL_SHARED=_ALL_SHARED,
        ROWS=rows_per_block, TILE_ROWS=blocks.tile, TILE_KEYS=_TILE_KEYS,
        FIRST_SPLIT=FIRST_SPLIT_KEYS, LEVEL_SPLITS=SPLITS_PER_LEVEL,
        **options, **launch, num_warps=4, num_stages=call.num_stages,
    )  # fmt: skip
    combine[(shape[0], num_heads)](
        sums, maxima, masses, call.results,
        blocks.first_rows, blocks.counts, plan.row_lengths, plan.max_splits,
        ROWS=rows_per_block, NUM_HEADS=num_heads, HEAD_DIM=head_dim,
        BLOCK_DIM=options["BLOCK_DIM"],
        FIRST_SPLIT=FIRST_SPLIT_KEYS, LEVEL_SPLITS=SPLITS_PER_LEVEL, num_warps=1, **launch,
    )  # fmt: skip


def _launch_chunks(call: _Call, blocks: RowBlocks) -> None:
    queries, plan = call.queries, call.plan
    attend_chunk[(len(blocks.counts), call.keys.shape[1])](
        queries, call.keys, call.values, *call.scale_pointers, call.results,
        blocks.sequences, blocks.first_rows, blocks.counts,
        plan.row_lengths, plan.positions, plan.page_table,
        queries.stride(0), plan.page_table.stride(0),
        call.scale_log2, plan.sliding_window or 0,
        TILE_ROWS=blocks.tile,
        TILE_KEYS=_TILE_KEYS if call.head_bytes < _WIDE_BYTES else _WIDE_TILE_KEYS,
        **call.shape_options(), num_warps=8, num_stages=call.num_stages,
    )  # fmt: skip
