"""What a model reads of sequences whose trees it grows in one pass, laid out for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kv.pages import PADDING_PAGE
from shared.kv.upload import Array, uploaded
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

_GREEDY = SamplingParams(temperature=0.0)


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
    """What S slots read.

    Attributes:
        sources: `[S, W]` int64, the row of what is read beside tokens that each open row reads.
        walks: `[S, any, any]` int64, see `WalkedTree.numbers`; none where trees grow.
    """

    state: RoundState
    sources: Tensor
    walks: Tensor

    @classmethod
    def empty(
        cls,
        num_slots: int,
        *,
        max_open_rows: int,
        num_pages: int,
        walk_size: tuple[int, int],
        device: torch.device,
    ) -> OpenInputs:
        """Returns slots without sequences; see `RoundState.empty`."""
        state = RoundState.empty(
            num_slots, max_open_rows=max_open_rows, num_pages=num_pages, device=device
        )
        sources = torch.zeros((num_slots, max_open_rows), dtype=torch.int64, device=device)
        walks = torch.zeros((num_slots, *walk_size), dtype=torch.int64, device=device)
        return cls(state, sources, walks)

    def first(self, num_slots: int) -> OpenInputs:
        """Returns a view of the first slots."""
        return OpenInputs(
            self.state.first(num_slots), self.sources[:num_slots], self.walks[:num_slots]
        )

    def emptied(self) -> OpenInputs:
        """Returns as many slots without sequences."""
        return OpenInputs(
            self.state.emptied(), torch.zeros_like(self.sources), torch.zeros_like(self.walks)
        )

    def fill(self, inputs: OpenInputs) -> None:
        """Copies inputs of as many slots, whose page table may be narrower."""
        own, other = self.state, inputs.state
        own.numbers.copy_(other.numbers)
        own.sampling.copy_(other.sampling)
        own.head_page_table[:, : other.head_page_table.shape[1]].copy_(other.head_page_table)
        self.sources.copy_(inputs.sources)
        self.walks.copy_(inputs.walks)


def open_inputs(
    sequences: Sequence[OpenSequence],
    *,
    num_slots: int,
    max_open_rows: int,
    num_pages: int,
    walk_size: tuple[int, int],
    device: torch.device,
) -> OpenInputs:
    """Lays out sequences in the first of `num_slots` slots. Does not wait for the device.

    Args:
        max_open_rows: W, most open rows of one.
        num_pages: columns of the page table.
        walk_size: of `WalkedTree.numbers`; zeros where trees grow.
    """
    numbers = np.tile(np.array(empty_number_row(max_open_rows), np.int64), (num_slots, 1))
    columns = np.tile(np.array(sampling_columns(_GREEDY), np.float64), (num_slots, 1))
    table = np.full((num_slots, num_pages), PADDING_PAGE, np.int32)
    sources = np.zeros((num_slots, max_open_rows), np.int64)
    walks = np.zeros((num_slots, *walk_size), np.int64)
    num_rows = 0
    for slot, each in enumerate(sequences):
        count = each.num_open
        assert 1 <= count <= max_open_rows, f"{count} open rows; a pass takes {max_open_rows}"
        _write_numbers(numbers[slot], each)
        columns[slot] = sampling_columns(each.sampling)
        pages = each.pages[:num_pages]
        table[slot, : len(pages)] = pages
        sources[slot, :count] = range(num_rows, num_rows + count)
        if each.walk is not None:
            walks[slot] = each.walk.numbers()
        num_rows += count
    arrays: list[Array] = [numbers, columns.view(np.int64), table, sources, walks]
    numbers_on_device, columns_on_device, *others = uploaded(arrays, device)
    table_on_device, sources_on_device, walks_on_device = others
    state = RoundState(
        numbers_on_device, columns_on_device.view(torch.float64), table_on_device, table_on_device
    )
    return OpenInputs(state, sources_on_device, walks_on_device)


def _write_numbers(row: Array, sequence: OpenSequence) -> None:
    row[LENGTH], row[OPEN], row[ACTIVE] = sequence.length, sequence.num_open, 1
    row[SEED], row[OFFSET] = signed_seed(sequence.sampling.seed), sequence.num_before
    row[TAIL : TAIL + sequence.num_open] = sequence.token_ids
