"""The arguments of one ragged forward pass: rows of several sequences over one paged KV cache.

The same dataclass serves prompt chunks, plain decode, tree verification and the levels of a
draft tree. Kernels, layers and graph runners take it as it is; nothing here knows phases.

Vocabulary. A *row* is one token to compute. A *slot* is one token's place in the KV pool:
`slot = page * page_size + offset`. A sequence's KV is addressed by *logical index* through its
page table; index and position differ inside a tree, where siblings share a position.

Visibility of row r of sequence b: every logical index below `prefix_lengths[b]`, and of the
*tail* `[prefix_lengths[b], kv_lengths[b])` either everything up to the row's own index (causal:
chunks, plain decode) or what `tail_mask` says (trees: a row sees its ancestors and itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """What one sequence contributes to a forward, as plain data (the scheduler's words).

    Attributes:
        token_ids: tokens to compute, R of them.
        positions: rotary position of each row.
        kv_start: logical KV index of the first row; the rows take R consecutive indices.
        pages: physical pages of the sequence, in logical order, covering `kv_start + R` tokens.
        prefix_length: logical indices below it are visible to every row.
        tail_mask: None for causal rows; else R tuples of booleans, one for each logical index in
            `[prefix_length, kv_start + R)`.
        logit_rows: the rows (0 … R-1) whose logits are wanted, in this order.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    kv_start: int
    pages: Sequence[int]
    prefix_length: int
    tail_mask: Sequence[Sequence[bool]] | None
    logit_rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tensors of one forward. T rows in all, B sequences, P page-table columns, L logit rows.

    Attributes:
        token_ids: `[T]` int64.
        positions: `[T]` int64.
        slots: `[T]` int64, where each row's key and value are written.
        query_starts: `[B + 1]` int32; the rows of sequence b start at `query_starts[b]`.
        kv_lengths: `[B]` int32, logical KV length including this forward's rows.
        prefix_lengths: `[B]` int32, see the module's text.
        page_table: `[B, P]` int32, padded with page 0, which is never a live page.
        tail_mask: `[T, W]` bool or None when every row is causal. Column w of a row of sequence b
            is the logical index `prefix_lengths[b] + w`. Rows of causal sequences have their
            causal mask written out only if W allows; `is_causal` says which rule holds.
        is_causal: `[B]` bool.
        logit_rows: `[L]` int64, indices into the T rows.
        max_query_length: most rows of one sequence; a host integer for launch grids.
        max_kv_length: greatest of `kv_lengths`; a host integer.
        page_size: tokens a page.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    kv_lengths: Tensor
    prefix_lengths: Tensor
    page_table: Tensor
    tail_mask: Tensor | None
    is_causal: Tensor
    logit_rows: Tensor
    max_query_length: int
    max_kv_length: int
    page_size: int


def build_batch(
    sequences: Sequence[SequenceRows], *, page_size: int, device: torch.device
) -> ForwardBatch:
    """Packs the rows of several sequences, in order, into the tensors of one forward."""
    assert sequences, "a forward needs at least one sequence"
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    logit_rows: list[int] = []
    for rows in sequences:
        first_row = query_starts[-1]
        token_ids.extend(rows.token_ids)
        positions.extend(rows.positions)
        slots.extend(_slots(rows, page_size))
        logit_rows.extend(first_row + row for row in rows.logit_rows)
        query_starts.append(first_row + len(rows.token_ids))
    kv_lengths = [rows.kv_start + len(rows.token_ids) for rows in sequences]
    max_pages = max(len(rows.pages) for rows in sequences)
    page_table = [[*rows.pages, *[0] * (max_pages - len(rows.pages))] for rows in sequences]
    wide = (token_ids, positions, slots, logit_rows)
    narrow = (
        query_starts,
        kv_lengths,
        [rows.prefix_length for rows in sequences],
        [page for row in page_table for page in row],
    )
    (token_rows, position_rows, slot_rows, logits), (starts, lengths, prefixes, pages) = _on_device(
        wide, narrow, device
    )
    return ForwardBatch(
        token_ids=token_rows,
        positions=position_rows,
        slots=slot_rows,
        query_starts=starts,
        kv_lengths=lengths,
        prefix_lengths=prefixes,
        page_table=pages.view(len(sequences), max_pages),
        tail_mask=_tail_mask(sequences, query_starts, device),
        is_causal=torch.tensor(
            [rows.tail_mask is None for rows in sequences], dtype=torch.bool, device=device
        ),
        logit_rows=logits,
        max_query_length=max(len(rows.token_ids) for rows in sequences),
        max_kv_length=max(kv_lengths),
        page_size=page_size,
    )


def _on_device(
    wide: Sequence[Sequence[int]], narrow: Sequence[Sequence[int]], device: torch.device
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns int64 tensors of `wide` and int32 tensors of `narrow`, which share one upload.

    A copy to a GPU costs the host about ten microseconds whatever its size.
    """
    wide_host, narrow_host = _aligned(wide, torch.int64), _aligned(narrow, torch.int32)
    packed = torch.cat((wide_host.view(torch.uint8), narrow_host.view(torch.uint8))).to(device)
    wide_size = wide_host.nbytes
    return (
        _cut(packed[:wide_size].view(torch.int64), wide),
        _cut(packed[wide_size:].view(torch.int32), narrow),
    )


def _aligned(parts: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    """Returns the parts end to end, each padded to whole vector loads, which kernels count on."""
    multiple = _VECTOR_BYTES // dtype.itemsize
    values: list[int] = []
    for part in parts:
        values.extend(part)
        values.extend([0] * (-len(part) % multiple))
    return torch.tensor(values, dtype=dtype)


def _cut(packed: Tensor, parts: Sequence[Sequence[int]]) -> list[Tensor]:
    multiple = _VECTOR_BYTES // packed.dtype.itemsize
    sizes = [len(part) + -len(part) % multiple for part in parts]
    return [
        piece[: len(part)] for piece, part in zip(torch.split(packed, sizes), parts, strict=True)
    ]


def _slots(rows: SequenceRows, page_size: int) -> list[int]:
    indices = range(rows.kv_start, rows.kv_start + len(rows.token_ids))
    return [rows.pages[index // page_size] * page_size + index % page_size for index in indices]


def _tail_mask(
    sequences: Sequence[SequenceRows], query_starts: Sequence[int], device: torch.device
) -> Tensor | None:
    width = max((len(rows.tail_mask[0]) for rows in sequences if rows.tail_mask), default=0)
    if width == 0:
        return None
    mask = torch.zeros((query_starts[-1], width), dtype=torch.bool)
    for start, rows in zip(query_starts, sequences, strict=False):
        if rows.tail_mask is None:
            continue
        tail = torch.tensor(rows.tail_mask, dtype=torch.bool)
        mask[start : start + tail.shape[0], : tail.shape[1]] = tail
    return mask.to(device)
