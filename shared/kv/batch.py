"""The arguments of one ragged forward pass: rows of several sequences over one paged KV cache.

The same dataclass serves prompt chunks, plain decode, tree verification and the levels of a
draft tree. Kernels, layers and graph runners take it as it is; it has no prefill or decode phase.

Vocabulary. A *row* is one token to compute. A *slot* is one token's place in the KV pool:
`slot = page * page_size + offset`. A sequence's KV is addressed by *logical index* through its
page table; index and position differ inside a tree, where siblings share a position.

Row r of sequence b sees every logical index below `prefix_lengths[b]`. Of the *tail*
`[prefix_lengths[b], kv_lengths[b])` a causal row (prompt chunk, plain decode) sees everything up to
its own index, and a tree's row sees what `tail_mask` says: its ancestors and itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kernels.split_plan import MAX_PLAIN_ROWS, PagedRows
from shared.kv.leases import KvLease
from shared.kv.upload import Array, uploaded

_TABLE_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's rows in a forward, as plain host data from the scheduler.

    Attributes:
        token_ids: tokens to compute, R of them.
        positions: rotary position of each row.
        kv_start: logical KV index of the first row; the rows take R consecutive indices.
        pages: physical pages of the sequence, in logical order, covering `kv_start + R` tokens.
        prefix_length: logical indices below it are visible to every row.
        tail_mask: None for causal rows; else R rows of booleans, one for each logical index in
            `[prefix_length, kv_start + R)`.
        logit_rows: rows (0 … R-1) that need logits, in this order.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    kv_start: int
    pages: Sequence[int]
    prefix_length: int
    tail_mask: Sequence[Sequence[bool]] | Array | None
    logit_rows: Sequence[int]

    @classmethod
    def causal(
        cls,
        token_ids: Sequence[int],
        start: int,
        pages: Sequence[int],
        logit_rows: Sequence[int] = (),
    ) -> SequenceRows:
        """Returns the rows of tokens that follow `start` computed tokens."""
        positions = range(start, start + len(token_ids))
        return cls(token_ids, positions, start, pages, start, None, logit_rows)


@dataclass(frozen=True, slots=True)
class Extent:
    """What the host knows of one sequence in a forward.

    Attributes:
        num_prompt_keys: its share of the batch's `num_prompt_keys`.
    """

    first_page: int
    num_rows: int
    num_prompt_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(PagedRows):
    """Tensors of one forward of T rows, of which L have logits.

    Attributes:
        token_ids: `[T]` int64.
        slots: `[T]` int64, where each row's key and value are written.
        logit_rows: `[L]` int64, indices into the T rows.
        extents: one for each of the B sequences; empty where the host does not know them.
    """

    token_ids: Tensor
    slots: Tensor
    logit_rows: Tensor
    extents: tuple[Extent, ...] = ()

    def of_sequences(self, kept: Sequence[int]) -> tuple[ForwardBatch, Tensor]:
        """Returns the batch of some sequences, without logits, and the indices of its rows among
        the T rows, `[R]` int64. Needs `extents`. Does not wait for the device."""
        extents = [self.extents[index] for index in kept]
        counts = np.array([extent.num_rows for extent in self.extents], np.int64)
        ends = np.cumsum(counts)
        starts = np.zeros(len(kept) + 1, np.int32)
        np.cumsum(counts[kept], out=starts[1:])
        rows, sequences, query_starts = uploaded(
            [
                np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in kept]),
                np.array(kept, np.int64),
                starts,
            ],
            self.token_ids.device,
        )
        batch = ForwardBatch(
            token_ids=self.token_ids.index_select(0, rows),
            positions=self.positions.index_select(0, rows),
            slots=self.slots.index_select(0, rows),
            query_starts=query_starts,
            kv_lengths=self.kv_lengths.index_select(0, sequences),
            prefix_lengths=self.prefix_lengths.index_select(0, sequences),
            page_table=self.page_table.index_select(0, sequences),
            tail_mask=None if self.tail_mask is None else self.tail_mask.index_select(0, rows),
            is_causal=self.is_causal.index_select(0, sequences),
            logit_rows=self.logit_rows[:0],
            max_query_length=max(extent.num_rows for extent in extents),
            max_kv_length=self.max_kv_length,
            page_size=self.page_size,
            num_prompt_keys=sum(extent.num_prompt_keys for extent in extents),
            extents=tuple(extents),
        )
        return batch, rows


def build_batch(
    sequences: Sequence[SequenceRows], *, page_size: int, device: torch.device
) -> ForwardBatch:
    """Packs the rows of several sequences, in order, into the tensors of one forward.

    Does not wait for the device.
    """
    assert sequences, "a forward needs at least one sequence"
    counts = np.array([len(rows.token_ids) for rows in sequences], np.int64)
    kv_starts = np.array([rows.kv_start for rows in sequences], np.int64)
    query_starts = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    kv_lengths = kv_starts + counts
    page_table = _page_table(sequences)
    extents = tuple(map(_extent, sequences))
    mask = _tail_mask(sequences, query_starts)
    token_ids, positions, slots, logit_rows, starts, lengths, prefixes, pages, causal, *tail = (
        uploaded(
            [
                _joined([rows.token_ids for rows in sequences]),
                _joined([rows.positions for rows in sequences]),
                _slots(query_starts, kv_starts, page_table, page_size),
                _joined(
                    [
                        [start + row for row in rows.logit_rows]
                        for start, rows in zip(query_starts.tolist(), sequences, strict=False)
                    ]
                ),
                query_starts.astype(np.int32),
                kv_lengths.astype(np.int32),
                np.array([rows.prefix_length for rows in sequences], np.int32),
                page_table,
                np.array([rows.tail_mask is None for rows in sequences], np.bool_),
                *([] if mask is None else [mask]),
            ],
            device,
        )
    )
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_starts=starts,
        kv_lengths=lengths,
        prefix_lengths=prefixes,
        page_table=pages,
        tail_mask=tail[0] if tail else None,
        is_causal=causal,
        logit_rows=logit_rows,
        max_query_length=int(counts.max()),
        max_kv_length=int(kv_lengths.max()),
        page_size=page_size,
        num_prompt_keys=sum(extent.num_prompt_keys for extent in extents),
        extents=extents,
    )


def _extent(rows: SequenceRows) -> Extent:
    num_rows = len(rows.token_ids)
    is_prompt = rows.tail_mask is None and num_rows > MAX_PLAIN_ROWS
    return Extent(rows.pages[0], num_rows, rows.kv_start + num_rows if is_prompt else 0)


def _joined(parts: Sequence[Sequence[int]]) -> Array:
    return np.fromiter(itertools.chain.from_iterable(parts), np.int64)


def _page_table(sequences: Sequence[SequenceRows]) -> Array:
    """Returns `[B, P]` int32, padded with page 0."""
    table = np.zeros((len(sequences), max(len(rows.pages) for rows in sequences)), np.int32)
    for row, rows in zip(table, sequences, strict=True):
        row[: len(rows.pages)] = rows.pages
    return table


def _slots(query_starts: Array, kv_starts: Array, page_table: Array, page_size: int) -> Array:
    """Returns `[T]` int64, the slot of each row; a sequence's rows have consecutive indices."""
    counts = np.diff(query_starts)
    owners = np.repeat(np.arange(len(counts)), counts)
    indices = np.arange(query_starts[-1]) + (kv_starts - query_starts[:-1])[owners]
    pages = page_table[owners, indices // page_size].astype(np.int64)
    slots: Array = pages * page_size + indices % page_size
    return slots


def _tail_mask(sequences: Sequence[SequenceRows], query_starts: Array) -> Array | None:
    masks = (rows.tail_mask for rows in sequences)
    width = max((len(mask[0]) for mask in masks if mask is not None), default=0)
    if width == 0:
        return None
    mask = np.zeros((query_starts[-1], width), np.bool_)
    for start, rows in zip(query_starts, sequences, strict=False):
        if rows.tail_mask is None:
            continue
        tail = np.asarray(rows.tail_mask, np.bool_)
        mask[start : start + tail.shape[0], : tail.shape[1]] = tail
    return mask


class DecodeBatches:
    """Builds the plain decode batches of one engine; owned by the engine's thread."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._pages = _PageTable()
        self._starts = torch.zeros(0, dtype=torch.int32, device=device)
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)
        self._is_causal = torch.zeros(0, dtype=torch.bool, device=device)

    def build(
        self, token_ids: Sequence[int], kv_starts: Sequence[int], leases: Sequence[KvLease]
    ) -> ForwardBatch:
        """Builds a batch of one causal row for each sequence, as `build_batch` does, but without
        extents. Does not wait for the device.

        Args:
            kv_starts: the position of each token, which is its logical KV index too.
        """
        positions = np.array(kv_starts, np.int64)
        columns, offsets = np.divmod(positions, self._page_size)
        table = self._pages.of(leases)
        pages = table[np.arange(len(leases)), columns]
        if len(self._rows) != len(leases):
            self._starts = _range(len(leases) + 1, torch.int32, self._device)
            self._rows = _range(len(leases), torch.int64, self._device)
            self._is_causal = torch.ones(len(leases), dtype=torch.bool, device=self._device)
        tokens, position_rows, slots, lengths, prefixes, page_table = uploaded(
            [
                np.array(token_ids, np.int64),
                positions,
                pages * np.int64(self._page_size) + offsets,
                (positions + 1).astype(np.int32),
                positions.astype(np.int32),
                table,
            ],
            self._device,
        )
        return ForwardBatch(
            token_ids=tokens,
            positions=position_rows,
            slots=slots,
            query_starts=self._starts,
            kv_lengths=lengths,
            prefix_lengths=prefixes,
            page_table=page_table,
            tail_mask=None,
            is_causal=self._is_causal,
            logit_rows=self._rows,
            max_query_length=1,
            max_kv_length=int(positions.max()) + 1,
            page_size=self._page_size,
        )


def empty_decode_batch(num_sequences: int, page_size: int, device: torch.device) -> ForwardBatch:
    """Returns a decode batch of sequences that compute their first token in the padding page."""
    zeros = torch.zeros(num_sequences, dtype=torch.int64, device=device)
    none = zeros.int()
    return ForwardBatch(
        token_ids=zeros,
        positions=zeros,
        slots=zeros,
        query_starts=_range(num_sequences + 1, torch.int32, device),
        kv_lengths=none + 1,
        prefix_lengths=none,
        page_table=none.unsqueeze(1),
        tail_mask=None,
        is_causal=torch.ones(num_sequences, dtype=torch.bool, device=device),
        logit_rows=_range(num_sequences, torch.int64, device),
        max_query_length=1,
        max_kv_length=1,
        page_size=page_size,
    )


def _range(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=dtype, device=device)


class _PageTable:
    """The page table of the last step, updated for leases whose pages changed."""

    def __init__(self) -> None:
        self._leases: list[KvLease] = []
        self._versions: list[int] = []
        self._table: Array = np.zeros((0, _TABLE_COLUMNS), np.int32)

    def of(self, leases: Sequence[KvLease]) -> Array:
        """Returns `[B, P]` int32, padded with page 0; the next call overwrites it."""
        num_columns = max(len(lease.pages) for lease in leases)
        versions = [lease.version for lease in leases]
        if list(leases) != self._leases or num_columns > self._table.shape[1]:
            num_kept = -(-num_columns // _TABLE_COLUMNS) * _TABLE_COLUMNS
            self._table = np.zeros((len(leases), num_kept), np.int32)
            self._leases, self._versions = list(leases), [-1] * len(leases)
        if versions != self._versions:
            for row, lease, old, new in zip(
                self._table, leases, self._versions, versions, strict=True
            ):
                if old != new:
                    row[: len(lease.pages)] = lease.pages
            self._versions = versions
        return self._table[:, :num_columns]
