"""Packing of plain decode, the usual step: every sequence computes one token more than before.

What stays from one such step to the next stays here: the page table, in which a row changes when
its lease does, and the arrays that depend on the number of sequences alone, which stay on the
device. Nothing is done row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.leases import KvLease
from shared.kv.upload import Array, uploaded

_TABLE_COLUMNS = 64


class DecodeBatches:
    """Builds the batches of one engine; owned by its thread."""

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
        """Returns what `build_batch` returns for one causal row a sequence. Does not wait.

        Args:
            token_ids: token of each sequence.
            kv_starts: its position and logical KV index.
            leases: its pages.
        """
        positions = np.array(kv_starts, np.int64)
        columns, offsets = np.divmod(positions, self._page_size)
        table = self._pages.of(leases)
        pages = table[np.arange(len(leases)), columns]
        self._keep_constants(len(leases))
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

    def _keep_constants(self, num_sequences: int) -> None:
        if len(self._rows) == num_sequences:
            return
        self._starts = _range(num_sequences + 1, torch.int32, self._device)
        self._rows = _range(num_sequences, torch.int64, self._device)
        self._is_causal = torch.ones(num_sequences, dtype=torch.bool, device=self._device)


def empty_decode_batch(num_sequences: int, page_size: int, device: torch.device) -> ForwardBatch:
    """Returns a step of sequences that compute their first token in the padding page."""
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
    """The pages of the last step's leases, as an array."""

    def __init__(self) -> None:
        self._leases: list[KvLease] = []
        self._versions: list[int] = []
        self._table: Array = np.zeros((0, _TABLE_COLUMNS), np.int32)

    def of(self, leases: Sequence[KvLease]) -> Array:
        """Returns `[B, P]` int32, padded with page 0; it changes with the next call."""
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
