"""Inputs of sequences whose trees grow in one pass, laid out for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kv.leases import PADDING_PAGE
from shared.kv.upload import Array, UploadBlock, uploaded
from shared.runtime.round_state import (
    ACTIVE,
    LENGTH,
    OFFSET,
    OPEN,
    SEED,
    TAIL,
    RoundState,
    empty_number_row,
)
from shared.runtime.walked_tree import WalkedTree
from shared.speculation.row_sampling import sampling_columns, signed_seed
from shared.tokens import SamplingParams

_GREEDY_COLUMNS = sampling_columns(SamplingParams(temperature=0.0))


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """One sequence with the rows that are yet to be computed.

    Attributes:
        token_ids: those that the open rows read, the last committed one included; at least one.
        num_computed: rows that are computed before them.
        num_before: the position of the token that the first row reads, less 1. A head's first row
            reads the second token of its window, a language model's the first one.
        pages: in logical order; they cover the open rows and those of the tree.
        walk: the tree that a pass computes behind them instead of growing one.
    """

    token_ids: Sequence[int]
    num_computed: int
    num_before: int
    sampling: SamplingParams
    pages: Sequence[int]
    walk: WalkedTree | None = None

    @property
    def num_open(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """The number of committed rows, and one more."""
        return self.num_computed + self.num_open + 1


@dataclass(frozen=True, slots=True, eq=False)
class OpenInputs:
    """The inputs of S slots.

    Attributes:
        state: has one page table.
        sources: `[S, W]` int64, the row of what is read beside tokens that each open row reads.
        walks: `[S, any, any]` int64, see `WalkedTree.numbers`; none where trees grow.
    """

    state: RoundState
    sources: Tensor
    walks: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor], table: Tensor) -> OpenInputs:
        """Names the tensors of `OpenArrays.fixed`, and of its `table`."""
        numbers, columns, sources, walks = tensors
        return cls(RoundState(numbers, columns.view(torch.float64), table, table), sources, walks)


@dataclass(frozen=True, slots=True, eq=False)
class OpenArrays:
    """`OpenInputs` in host memory.

    Attributes:
        fixed: numbers and sampling of the slots, sources, walks.
        table: `[S, P]` int32, the page table.
    """

    fixed: Sequence[Array]
    table: Array

    @classmethod
    def of(
        cls,
        sequences: Sequence[OpenSequence],
        *,
        num_slots: int,
        max_open_rows: int,
        num_pages: int,
        walk_size: tuple[int, int],
    ) -> OpenArrays:
        """Lays out sequences in the first of `num_slots` slots.

        Args:
            max_open_rows: W, most open rows of one.
            num_pages: P.
            walk_size: of `WalkedTree.numbers`; zeros where trees grow.
        """
        num_empty = num_slots - len(sequences)
        rows = [_number_row(each, max_open_rows) for each in sequences]
        numbers = np.array([*rows, *[empty_number_row(max_open_rows)] * num_empty], np.int64)
        sampling = [sampling_columns(each.sampling) for each in sequences]
        columns = np.array([*sampling, *[_GREEDY_COLUMNS] * num_empty], np.float64)
        table = np.full((num_slots, num_pages), PADDING_PAGE, np.int32)
        walks = np.zeros((num_slots, *walk_size), np.int64)
        for slot, each in enumerate(sequences):
            pages = each.pages[:num_pages]
            table[slot, : len(pages)] = pages
            if each.walk is not None:
                walks[slot] = each.walk.numbers()
        sources = np.zeros((num_slots, max_open_rows), np.int64)
        # Slot by slot, the open rows read one row after another.
        is_open = np.arange(max_open_rows) < numbers[: len(sequences), OPEN, None]
        sources[: len(sequences)][is_open] = np.arange(np.count_nonzero(is_open))
        return cls((numbers, columns.view(np.int64), sources, walks), table)

    def upload(self, device: torch.device) -> OpenInputs:
        """Returns them on the device. Does not wait for it."""
        *fixed, table = uploaded((*self.fixed, self.table), device)
        return OpenInputs.of(fixed, table)


class OpenSlots:
    """Inputs at addresses that never change, of slots without sequences at first.

    Args:
        empty: their sizes; no page table is wider.
    """

    def __init__(self, empty: OpenArrays, device: torch.device) -> None:
        self._block = UploadBlock(empty.fixed, empty.table, device)
        [self._table] = uploaded([empty.table], device)
        self.inputs = OpenInputs.of(self._block.tensors, self._table)

    def fill(self, arrays: OpenArrays) -> None:
        """Queues the arrays of as many slots."""
        pages = self._block.fill(arrays.fixed, arrays.table)
        self._table[:, : pages.shape[1]].copy_(pages)


def _number_row(sequence: OpenSequence, max_open_rows: int) -> list[int]:
    row, count = empty_number_row(max_open_rows), len(sequence.token_ids)
    assert 1 <= count <= max_open_rows, f"{count} open rows; a pass takes {max_open_rows}"
    row[LENGTH], row[OPEN], row[ACTIVE] = sequence.num_computed + count + 1, count, 1
    row[SEED], row[OFFSET] = signed_seed(sequence.sampling.seed), sequence.num_before
    row[TAIL : TAIL + count] = sequence.token_ids
    return row
