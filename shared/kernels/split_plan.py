"""The plan of the CUDA attention kernels, computed once per forward and shared by all layers.

Every row sees its keys as one list in path order: the prefix through the page table, then the
visible keys of its own tail, without the hidden ones. A token therefore meets the same keys at the
same positions of the list whether it is computed as a tree node, as a plain token or in a chunk,
and the sums over the list have the same bits. The list is cut at fixed positions (splits), whatever
else is in the batch, and the partial results are added in order.

Rows are grouped into blocks of one sequence, because rows of a block share the loads of their
common prefix. Prompt chunks have larger blocks and a kernel of their own. The device computes
which sequence a block belongs to: reading lengths on the host would wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.kernel_settings import dispatched

# Longer causal runs are prompt chunks. Their keys are not split: they have enough rows to fill the
# device. A draft's open tokens and its verified chain of 10 have 21 rows.
MAX_PLAIN_ROWS = 24
# Rows times query heads of one key head in a block: the tile of one warp's matrix instructions.
PLAIN_TILE = 16
CHUNK_TILE = 128
# The most key heads on one device.
MAX_KV_HEADS = 128
# Splits of a level have one length and the next level doubles it, so that short contexts are cut
# finely enough to fill the device and long ones need few partial results.
FIRST_SPLIT_KEYS = 64
SPLITS_PER_LEVEL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """The rows of a forward as attention reads them: T rows of B sequences, with P page-table
    columns. `shared.kv.batch` says which keys a row sees.

    Attributes:
        positions: `[T]` int64.
        query_starts: `[B + 1]` int32; the rows of sequence b start at `query_starts[b]`.
        kv_lengths: `[B]` int32, logical KV length including this forward's rows.
        prefix_lengths: `[B]` int32, logical indices below it are visible to every row.
        page_table: `[B, P]` int32, padded with page 0, which is never a live page.
        tail_mask: `[T, W]` bool or None when every row is causal. Column w of a row of sequence b
            is the logical index `prefix_lengths[b] + w`. Not used for causal sequences.
        is_causal: `[B]` bool.
        max_query_length: most rows of one sequence; a host integer for launch grids.
        max_kv_length: greatest of `kv_lengths`; a host integer.
        num_prompt_keys: sum of `kv_lengths` over prompts, causal sequences of more than
            `MAX_PLAIN_ROWS` rows; a host integer, 0 where it is not known.
    """

    positions: Tensor
    query_starts: Tensor
    kv_lengths: Tensor
    prefix_lengths: Tensor
    page_table: Tensor
    tail_mask: Tensor | None
    is_causal: Tensor
    max_query_length: int
    max_kv_length: int
    page_size: int
    num_prompt_keys: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.positions.is_cuda


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """N blocks of consecutive rows of one sequence each.

    Attributes:
        sequences: `[N]` int32.
        first_rows: `[N]` int32.
        counts: `[N]` int32, rows in the block; 0 for blocks that are not needed.
        tile: rows times query groups, padded to a power of two.
    """

    sequences: Tensor
    first_rows: Tensor
    counts: Tensor
    tile: int


@dataclass(frozen=True, slots=True)
class PlanParts:
    """The tensors of a plan for T rows of B sequences.

    Attributes:
        row_lengths: `[T]` int32, keys each row sees, ignoring the window; 0 for padding rows.
        shared_lengths: `[B]` int32, keys that the rows of a sequence read through its page table,
            at the same positions of their lists.
        tail_slots: `[T, W]` int64, slots of a tree row's visible tail keys, in order; None
            without trees.
        counters: int32 zeros, `MAX_KV_HEADS` for each plain block.
        plain_blocks: blocks of plain tokens and trees.
        chunk_blocks: blocks of prompt chunks; None when no sequence can be a chunk.
    """

    row_lengths: Tensor
    shared_lengths: Tensor
    tail_slots: Tensor | None
    counters: Tensor
    plain_blocks: RowBlocks
    chunk_blocks: RowBlocks | None


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Plan of one forward.

    Attributes:
        sliding_window: as in `plan_attention`.
        max_splits: splits of the longest row.
    """

    batch: PagedRows
    parts: PlanParts
    sliding_window: int | None
    max_splits: int


def plan_splits(batch: PagedRows, sliding_window: int | None, num_query_groups: int) -> SplitPlan:
    """Computes the plan without waiting for the device, since the host knows every shape.

    Arguments are those of `plan_attention`. Rows past `query_starts[-1]` are padding: no block
    holds them, and their result is zero.
    """
    parts = parts_of_rows(batch, *cuts_of(batch, num_query_groups))
    return SplitPlan(batch, parts, sliding_window, num_splits(batch.max_kv_length))


@dataclass(frozen=True, slots=True)
class BlockCut:
    """The division of rows into blocks.

    Attributes:
        tile: see `RowBlocks`.
    """

    rows_per_block: int
    max_blocks: int
    tile: int


def num_splits(num_keys: int, first_keys: int = FIRST_SPLIT_KEYS) -> int:
    """Returns the number of splits of a list of keys; the first split has `first_keys`."""
    level_keys, level_split, count = 0, first_keys, 0
    while num_keys - level_keys > level_split * SPLITS_PER_LEVEL:
        level_keys += level_split * SPLITS_PER_LEVEL
        level_split *= 2
        count += SPLITS_PER_LEVEL
    return count + -(-(num_keys - level_keys) // level_split)


def num_part_rows(num_rows: int, num_sequences: int, num_query_groups: int) -> int:
    """Returns the number of rows with partial results, in a forward of plain rows and trees."""
    rows_per_block = tile_of(num_query_groups) // num_query_groups
    return max_blocks_of(num_rows, num_sequences, rows_per_block) * rows_per_block


def tile_of(num_query_groups: int) -> int:
    """Returns the tile (see `RowBlocks`) of a block of plain rows and trees."""
    return max(PLAIN_TILE, _power_of_two(num_query_groups))


def max_blocks_of(num_rows: int, num_sequences: int, rows_per_block: int) -> int:
    """Returns the most blocks that rows can need, however they are distributed over sequences."""
    return min(num_rows, num_rows // rows_per_block + num_sequences)


def max_plain_rows(batch: PagedRows) -> int:
    """Returns the most rows that can be plain tokens and tree nodes."""
    if batch.tail_mask is not None:
        return len(batch.positions)
    return min(len(batch.positions), len(batch.kv_lengths) * MAX_PLAIN_ROWS)


def cuts_of(batch: PagedRows, num_query_groups: int) -> tuple[BlockCut, BlockCut | None]:
    """Returns the cut of plain rows, and that of chunks if there can be any."""
    plain_cut = cut_of(batch, PLAIN_TILE, num_query_groups, max_plain_rows(batch))
    if batch.max_query_length <= MAX_PLAIN_ROWS:
        return plain_cut, None
    return plain_cut, cut_of(batch, CHUNK_TILE, num_query_groups, len(batch.positions))


def cut_of(batch: PagedRows, tile: int, num_query_groups: int, max_rows: int) -> BlockCut:
    """Returns the cut of up to `max_rows` rows into blocks that fill a tile."""
    tile = max(tile, _power_of_two(num_query_groups))
    rows_per_block = tile // num_query_groups
    max_blocks = max_blocks_of(max_rows, len(batch.kv_lengths), rows_per_block)
    return BlockCut(rows_per_block, max_blocks, tile)


@dispatched("split_plan_triton")
def parts_of_rows(
    batch: PagedRows, plain_cut: BlockCut, chunk_cut: BlockCut | None = None
) -> PlanParts:
    """Computes the tensors of a plan; without `chunk_cut` no sequence is a chunk."""
    row_lengths, tail_slots = plain_rows(batch)
    num_rows = batch.query_starts[1:] - batch.query_starts[:-1]
    is_chunk = batch.is_causal & (num_rows > MAX_PLAIN_ROWS)
    if chunk_cut is None:
        is_chunk = torch.zeros_like(is_chunk)
    blocks = plain_blocks(batch.query_starts, num_rows * ~is_chunk, plain_cut)
    return PlanParts(
        row_lengths=row_lengths,
        # Causal rows see different numbers of keys, but each key at the same position.
        shared_lengths=torch.where(batch.is_causal, batch.kv_lengths, batch.prefix_lengths),
        tail_slots=tail_slots,
        counters=blocks.counts.new_zeros(MAX_KV_HEADS * len(blocks.counts)),
        plain_blocks=blocks,
        chunk_blocks=None
        if chunk_cut is None
        else plain_blocks(batch.query_starts, num_rows * is_chunk, chunk_cut),
    )


def plain_rows(batch: PagedRows) -> tuple[Tensor, Tensor | None]:
    """Returns the number of keys that each row sees, and the slots of those in tree tails."""
    sequences = sequence_of_rows(batch)
    rows = torch.arange(len(batch.positions), device=batch.positions.device, dtype=torch.int32)
    own_index = (batch.kv_lengths - batch.query_starts[1:])[sequences] + rows
    prefix = batch.prefix_lengths[sequences]
    lengths = torch.maximum(own_index + 1, prefix)
    tail_slots = None
    if batch.tail_mask is not None:
        tree_lengths = prefix + batch.tail_mask.sum(1, dtype=torch.int32)
        lengths = torch.where(batch.is_causal[sequences], lengths, tree_lengths)
        # A stable sort moves the visible columns to the front and keeps their order.
        columns = torch.sort(~batch.tail_mask, dim=1, stable=True).indices
        indices = columns + prefix.unsqueeze(1)
        # Indices past the page table get any slot.
        pages = (indices // batch.page_size).clamp_(max=batch.page_table.shape[1] - 1)
        slots = batch.page_table[sequences.unsqueeze(1), pages].long() * batch.page_size
        tail_slots = slots + indices % batch.page_size
    return lengths.masked_fill(rows >= batch.query_starts[-1], 0), tail_slots


def sequence_of_rows(batch: PagedRows) -> Tensor:
    """Returns `[T]` int64, the sequence each row belongs to; the last one for padding rows."""
    rows = torch.arange(len(batch.positions), device=batch.positions.device, dtype=torch.int32)
    sequences = torch.bucketize(rows, batch.query_starts[1:], right=True)
    return sequences.clamp_(max=len(batch.kv_lengths) - 1)


def plain_blocks(starts: Tensor, num_rows: Tensor, cut: BlockCut) -> RowBlocks:
    """Cuts the `num_rows[b]` rows from `starts[b]` of each sequence b into blocks."""
    rows_per_block = cut.rows_per_block
    num_blocks = (num_rows + (rows_per_block - 1)) // rows_per_block
    ends = num_blocks.cumsum(0, dtype=torch.int32)
    blocks = torch.arange(cut.max_blocks, device=starts.device, dtype=torch.int32)
    sequences = torch.bucketize(blocks, ends, right=True).clamp_(max=len(num_rows) - 1)
    offsets = (blocks - (ends - num_blocks)[sequences]) * rows_per_block
    counts = (num_rows[sequences] - offsets).clamp_(0, rows_per_block)
    return RowBlocks(sequences.to(torch.int32), starts[sequences] + offsets, counts, cut.tile)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
