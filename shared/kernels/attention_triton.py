"""Launches the kernels of `attention_jit`: paged attention on CUDA."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shared.kernels.attention_jit import attend_chunk, attend_splits, attend_whole, combine
from shared.kernels.cache import CacheScales
from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.launch import dependent_launch, empties
from shared.kernels.split_plan import (
    FIRST_SPLIT_KEYS,
    PLAIN_TILE,
    SPLITS_PER_LEVEL,
    RowBlocks,
    SplitPlan,
)

# About eight programs per multiprocessor; more programs would have no work.
_TARGET_PROGRAMS = 1024
_MIN_SPLIT_PROGRAMS = 8
# Blocks times key heads from which one program computes a whole block. Measured on an H200, at 600
# keys, microseconds a layer with shared and with whole blocks: 17.6 and 19.4 for 160 programs of
# chains, 23.4 and 21.1 for 240; 26.8 and 28.8 for 216 of trees, 33.1 and 26.5 for 320. Graphs count
# the most blocks that are possible, up to twice the actual number.
# Triton's interpreter runs one program after another, so fewer programs are less work for it.
FEWEST_WHOLE = 0 if IS_INTERPRETING else 192
# Programs share a longer key list, unless `FEWEST_CHAINS` lists of its length run together: a few
# long lists would leave the device idle.
CHAIN_KEYS = 4096
FEWEST_CHAINS = 160
_LONG_PROGRAMS = 4
# Keys of a tile of plain rows and trees: with this many a warp fits its data in registers.
_TILE_KEYS = 32
# Tiles of keys and values in shared memory, plus one. With trees some programs compute rows' own
# keys; room for more programs then gains more than a third tile.
_SPLIT_STAGES = 3
_TREE_STAGES = 2
_WHOLE_STAGES = 4
# Bytes of each key that a warp loads at once: 8 keys then share one instruction, and one address
# and mask serve all parts of a key.
_PART_BYTES = 64
# Tree rows whose own keys one program of `attend_splits` computes.
OWN_ROWS = 2
_MOST_WARPS = 4
_CHUNK_TILE_KEYS = 64
# For heads of at least `_WIDE_BYTES`, a chunk's tile holds fewer keys, to fit in shared memory.
_WIDE_TILE_KEYS = 32
_WIDE_BYTES = 512
_NARROW_BYTES = 256


def split_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: SplitPlan,
    *,
    scale: float,
    cache_scales: CacheScales | None,
) -> Tensor:
    """Attends as `paged_attention` does, with its arguments and result. Results of padding rows are
    undefined."""
    assert queries.stride(2) == 1
    assert queries.stride(1) == queries.shape[2]
    assert keys.is_contiguous()
    assert values.is_contiguous()
    results = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if cache_scales is not None:
        keys, values = keys.view(torch.int8), values.view(torch.int8)
    scale_log2 = scale * math.log2(math.e)
    call = _Call(queries, keys, values, results, plan, scale_log2, cache_scales)
    num_programs = len(plan.parts.plain_blocks.counts) * keys.shape[1]
    launch_plain = _launch_whole if num_programs >= FEWEST_WHOLE else _launch_splits
    launch_plain(call)
    if plan.parts.chunk_blocks is not None:
        _launch_chunks(call, plan.parts.chunk_blocks)
    return results


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one attention call.

    Attributes:
        keys, values: those of an e4m3 cache as int8 bytes.
        scale_log2: factor of the scores for base 2, since the hardware computes powers of 2.
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
        """Scales of keys and values; any tensors if the kernels do not read them."""
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
        """Tiles of keys and values in flight, as many as fit in shared memory."""
        return 2 if self.head_bytes <= _WIDE_BYTES else 1

    @property
    def num_warps(self) -> int:
        """Warps of a program of plain rows and trees: a warp with rows of its own does not wait for
        others."""
        if self.queries.element_size() != 2 or self.head_bytes > _NARROW_BYTES:
            return _MOST_WARPS
        return min(_MOST_WARPS, self.plan.parts.plain_blocks.tile // PLAIN_TILE)

    @property
    def num_parts(self) -> int:
        """Parts of the dimensions of plain rows and trees, loaded and multiplied one by one."""
        if self.queries.element_size() != 2 or self.head_bytes > _NARROW_BYTES:
            return 1
        return max(1, self.block_dim * self.keys.element_size() // _PART_BYTES)

    @property
    def block_dim(self) -> int:
        return max(16, int(triton.next_power_of_2(self.queries.shape[2])))

    def stages_of(self, wanted: int) -> int:
        return wanted if self.head_bytes <= _NARROW_BYTES else self.num_stages

    def parts(self, rows_per_block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Allocates sums, maxima and masses for every split of the plain blocks' rows."""
        num_heads, head_dim = self.queries.shape[1:]
        num_rows = len(self.plan.parts.plain_blocks.counts) * rows_per_block
        shape = (num_rows, num_heads, self.plan.max_splits)
        sums = self.queries.new_empty((*shape, head_dim), dtype=torch.float32)
        maxima, masses = empties(2, shape, torch.float32, sums.device)
        return sums, maxima, masses

    def shape_options(self) -> dict[str, int | bool]:
        """Returns the compile-time constants that both kernels share."""
        head_dim = self.queries.shape[2]
        return {
            "NUM_KV_HEADS": self.keys.shape[1],
            "NUM_GROUPS": self.num_groups,
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": self.block_dim,
            "PAGE_SIZE": self.plan.batch.page_size,
            "HAS_WINDOW": self.plan.sliding_window is not None,
            "IS_E4M3": self.cache_scales is not None,
        }


def _launch_whole(call: _Call) -> None:
    queries, plan, parts, batch = call.queries, call.plan, call.plan.parts, call.plan.batch
    blocks = parts.plain_blocks
    num_kv_heads, rows_per_block = call.keys.shape[1], blocks.tile // call.num_groups
    assert num_kv_heads * len(blocks.counts) <= len(parts.counters)
    has_tail = parts.tail_slots is not None
    tail = batch.page_table if parts.tail_slots is None else parts.tail_slots
    attend_whole[(num_kv_heads, len(blocks.counts), _LONG_PROGRAMS)](
        queries, call.keys, call.values, *call.scale_pointers, call.results,
        *call.parts(rows_per_block), parts.counters,
        blocks.sequences, blocks.first_rows, blocks.counts,
        parts.row_lengths, parts.shared_lengths, batch.positions, batch.page_table, tail,
        queries.stride(0), batch.page_table.stride(0), tail.stride(0),
        plan.max_splits, call.scale_log2, plan.sliding_window or 0, FEWEST_CHAINS,
        HAS_TAIL=has_tail, CHAIN_KEYS=CHAIN_KEYS,
        ROWS=rows_per_block, BLOCK_ROWS=triton.next_power_of_2(rows_per_block),
        TILE_ROWS=blocks.tile, TILE_KEYS=_TILE_KEYS,
        FIRST_SPLIT=FIRST_SPLIT_KEYS, LEVEL_SPLITS=SPLITS_PER_LEVEL,
        PARTS=call.num_parts, **call.shape_options(), num_warps=call.num_warps,
        num_stages=call.stages_of(_WHOLE_STAGES),
    )  # fmt: skip


def _launch_splits(call: _Call) -> None:
    queries, plan, parts, batch = call.queries, call.plan, call.plan.parts, call.plan.batch
    blocks = parts.plain_blocks
    num_rows, num_heads, head_dim = queries.shape
    num_blocks, num_kv_heads = len(blocks.counts), call.keys.shape[1]
    rows_per_block = blocks.tile // call.num_groups
    sums, maxima, masses = call.parts(rows_per_block)
    wanted = -(-_TARGET_PROGRAMS // (num_blocks * num_kv_heads))
    num_shared = min(plan.max_splits, max(_MIN_SPLIT_PROGRAMS, wanted))
    has_tail = parts.tail_slots is not None
    num_own = -(-rows_per_block // OWN_ROWS) if has_tail else 0
    tail = batch.page_table if parts.tail_slots is None else parts.tail_slots
    options, launch = call.shape_options(), dependent_launch(queries.device, num_rows)
    attend_splits[(num_kv_heads, num_blocks, num_shared + num_own)](
        queries, call.keys, call.values, *call.scale_pointers, sums, maxima, masses,
        blocks.sequences, blocks.first_rows, blocks.counts,
        parts.row_lengths, parts.shared_lengths, batch.positions, batch.page_table, tail,
        queries.stride(0), batch.page_table.stride(0), tail.stride(0),
        plan.max_splits, num_shared, call.scale_log2, plan.sliding_window or 0,
        HAS_TAIL=has_tail,
        ROWS=rows_per_block, BLOCK_ROWS=triton.next_power_of_2(rows_per_block),
        TILE_ROWS=blocks.tile, TILE_KEYS=_TILE_KEYS,
        FIRST_SPLIT=FIRST_SPLIT_KEYS, LEVEL_SPLITS=SPLITS_PER_LEVEL, OWN_ROWS=OWN_ROWS,
        PARTS=call.num_parts, **options, **launch, num_warps=call.num_warps,
        num_stages=call.stages_of(_TREE_STAGES if has_tail else _SPLIT_STAGES),
    )  # fmt: skip
    combine[(num_blocks * rows_per_block, num_heads)](
        sums, maxima, masses, call.results,
        blocks.first_rows, blocks.counts, parts.row_lengths, plan.max_splits,
        ROWS=rows_per_block, NUM_HEADS=num_heads, HEAD_DIM=head_dim,
        BLOCK_DIM=options["BLOCK_DIM"],
        FIRST_SPLIT=FIRST_SPLIT_KEYS, LEVEL_SPLITS=SPLITS_PER_LEVEL, num_warps=1,
        **launch,
    )  # fmt: skip


def _launch_chunks(call: _Call, blocks: RowBlocks) -> None:
    queries, plan = call.queries, call.plan
    attend_chunk[(len(blocks.counts), call.keys.shape[1])](
        queries, call.keys, call.values, *call.scale_pointers, call.results,
        blocks.sequences, blocks.first_rows, blocks.counts,
        plan.parts.row_lengths, plan.batch.positions, plan.batch.page_table,
        queries.stride(0), plan.batch.page_table.stride(0),
        call.scale_log2, plan.sliding_window or 0,
        TILE_ROWS=blocks.tile,
        TILE_KEYS=_CHUNK_TILE_KEYS if call.head_bytes < _WIDE_BYTES else _WIDE_TILE_KEYS,
        **call.shape_options(), num_warps=8, num_stages=call.num_stages,
    )  # fmt: skip
