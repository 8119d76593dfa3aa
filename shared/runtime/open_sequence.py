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
    """

    token_ids: Sequence[int]
    num_computed: int
    num_before: int
    sampling: SamplingParams
    pages: Sequence[int]

    @property
    def num_open(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """The number of committed rows, and one more."""
        return self.num_computed + self.num_open + 1


@dataclass(frozen=True, slots=True, eq=False)
class OpenInputs:
    """A state of S slots, and the row of the joined features `[S, W]` int64 of each open row."""

    state: RoundState
    feature_slots: Tensor

    @classmethod
    def empty(
        cls, num_slots: int, *, max_open_rows: int, num_pages: int, device: torch.device
    ) -> OpenInputs:
        """Returns slots without sequences; see `RoundState.empty`."""
        state = RoundState.empty(
            num_slots, max_open_rows=max_open_rows, num_pages=num_pages, device=device
        )
        slots = torch.zeros((num_slots, max_open_rows), dtype=torch.int64, device=device)
        return cls(state, slots)

    def first(self, num_slots: int) -> OpenInputs:
        """Returns a view of the first slots."""
        return OpenInputs(self.state.first(num_slots), self.feature_slots[:num_slots])

    def fill(self, inputs: OpenInputs) -> None:
        """Copies inputs of as many slots, whose page table may be narrower."""
        own, other = self.state, inputs.state
        own.numbers.copy_(other.numbers)
        own.sampling.copy_(other.sampling)
        own.head_page_table[:, : other.head_page_table.shape[1]].copy_(other.head_page_table)
        self.feature_slots.copy_(inputs.feature_slots)


def open_inputs(
    sequences: Sequence[OpenSequence],
    *,
    num_slots: int,
    max_open_rows: int,
    num_pages: int,
    device: torch.device,
) -> OpenInputs:
    """Lays out sequences in the first of `num_slots` slots. Does not wait for the device.

    Args:
        max_open_rows: W, most open rows of one.
        num_pages: columns of the page table.
    """
    numbers = np.tile(np.array(empty_number_row(max_open_rows), np.int64), (num_slots, 1))
    columns = np.tile(np.array(sampling_columns(_GREEDY), np.float64), (num_slots, 1))
    table = np.full((num_slots, num_pages), PADDING_PAGE, np.int32)
    slots = np.zeros((num_slots, max_open_rows), np.int64)
    num_rows = 0
    for slot, each in enumerate(sequences):
        count = each.num_open
        assert 1 <= count <= max_open_rows, f"{count} open rows; a pass takes {max_open_rows}"
        _write_numbers(numbers[slot], each)
        columns[slot] = sampling_columns(each.sampling)
        pages = each.pages[:num_pages]
        table[slot, : len(pages)] = pages
        slots[slot, :count] = range(num_rows, num_rows + count)
        num_rows += count
    on_device = uploaded([numbers, columns.view(np.int64), slots, table], device)
    state = RoundState(on_device[0], on_device[1].view(torch.float64), on_device[3], on_device[3])
    return OpenInputs(state, on_device[2])


def _write_numbers(row: Array, sequence: OpenSequence) -> None:
    row[LENGTH], row[OPEN], row[ACTIVE] = sequence.length, sequence.num_open, 1
    row[SEED], row[OFFSET] = signed_seed(sequence.sampling.seed), sequence.num_before
    row[TAIL : TAIL + sequence.num_open] = sequence.token_ids
