"""The device state of speculative rounds, one *slot* a sequence.

A round reads it, and its last kernel writes what the next round starts from, so rounds follow one
another without the host. A slot without a sequence computes in the padding page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kv.leases import PADDING_PAGE
from shared.kv.upload import Array, uploaded
from shared.speculation.row_sampling import sampling_columns, signed_seed
from shared.tokens import SamplingParams

NewPage = tuple[int, int, int]
"""A slot, the place in its sequence that a page has, and the page."""
LENGTH, OPEN, ACTIVE, SEED, OFFSET, ENDED, TAIL = range(7)
"""Columns of `RoundState.numbers`; the tail takes the rest."""
# The least that a forward can compute: one open row behind one token.
_EMPTY_LENGTH, _EMPTY_OPEN = 2, 1


@dataclass(frozen=True, slots=True, eq=False)
class RoundState:
    """S slots. Columns are views of the first two tensors, so that a slot is written by few copies.

    Attributes:
        numbers: `[S, 6 + W]` int64; see the properties.
        sampling: `[S, 4]` float64, `sampling_columns` of each slot.
        page_table: `[S, P]` int32, the target's pages, padded with the padding page.
        head_page_table: `[S, P]` int32, the head's.
    """

    numbers: Tensor
    sampling: Tensor
    page_table: Tensor
    head_page_table: Tensor

    @classmethod
    def empty(
        cls, num_slots: int, *, max_open_rows: int, num_pages: int, device: torch.device
    ) -> RoundState:
        """Returns S slots without sequences.

        Args:
            max_open_rows: W, most tokens a round commits to one sequence.
            num_pages: P, pages of the longest sequence.
        """
        tables = torch.full(
            (2, num_slots, num_pages), PADDING_PAGE, dtype=torch.int32, device=device
        )
        numbers = torch.tensor([_number_row((), 0, max_open_rows)], device=device)
        greedy = torch.tensor([sampling_columns(_GREEDY)], dtype=torch.float64, device=device)
        return cls(numbers.repeat(num_slots, 1), greedy.repeat(num_slots, 1), tables[0], tables[1])

    @property
    def lengths(self) -> Tensor:
        """`[S]` int64, committed tokens; the last one is not computed by the target."""
        return self.numbers[:, LENGTH]

    @property
    def num_open(self) -> Tensor:
        """`[S]` int64, in [1, W]: tokens at the end that the head has not read, the last included.

        Their rows in the head's cache come behind `lengths - 1 - num_open` computed ones.
        """
        return self.numbers[:, OPEN]

    @property
    def is_active(self) -> Tensor:
        """`[S]` int64, 1 where the slot takes part in the round, else 0: it has no sequence, or one
        that no tree was prepared for."""
        return self.numbers[:, ACTIVE]

    @property
    def seeds(self) -> Tensor:
        """`[S]` int64."""
        return self.numbers[:, SEED]

    @property
    def drawn_positions(self) -> Tensor:
        """`[S]` int64, the position of the token after the last committed one. Beside the length
        it counts what a head's window leaves out; in rounds that is nothing."""
        return self.lengths + self.numbers[:, OFFSET]

    @property
    def ended_rows(self) -> Tensor:
        """`[S]` int64, the row of its tree at which the last round of the slot ended."""
        return self.numbers[:, ENDED]

    @property
    def roots(self) -> Tensor:
        """`[S]` int64, the last committed tokens."""
        return self.open_tokens.gather(1, self.num_open.unsqueeze(1) - 1).squeeze(1)

    @property
    def open_tokens(self) -> Tensor:
        """`[S, W]` int64, the last `num_open` committed tokens in order, then anything."""
        return self.numbers[:, TAIL:]

    @property
    def num_slots(self) -> int:
        return len(self.numbers)

    def first(self, num_slots: int) -> RoundState:
        """Returns a view of the first slots."""
        return self.of(slice(num_slots))

    def of(self, slots: slice) -> RoundState:
        """Returns a view of some slots."""
        return RoundState(
            self.numbers[slots],
            self.sampling[slots],
            self.page_table[slots],
            self.head_page_table[slots],
        )

    def narrowed(self, max_open_rows: int) -> RoundState:
        """Returns a view for rounds that commit no more than `max_open_rows` tokens."""
        numbers = self.numbers[:, : TAIL + max_open_rows]
        return RoundState(numbers, self.sampling, self.page_table, self.head_page_table)

    def emptied(self) -> RoundState:
        """Returns a state of as many slots, without sequences."""
        num_open, num_pages = self.open_tokens.shape[1], self.page_table.shape[1]
        return RoundState.empty(
            self.num_slots, max_open_rows=num_open, num_pages=num_pages, device=self.numbers.device
        )

    def copy_(self, other: RoundState) -> None:
        """Takes all values of a state of the same sizes."""
        self.numbers.copy_(other.numbers)
        self.sampling.copy_(other.sampling)
        self.page_table.copy_(other.page_table)
        self.head_page_table.copy_(other.head_page_table)

    def place(self, sequences: Mapping[int, SlotSequence]) -> None:
        """Puts sequences into slots, their heads' rows computed but for the last ones. It takes one
        copy from the host, however many there are."""
        width, placed = self.open_tokens.shape[1], sequences.values()
        tables = self._no_pages(len(sequences))
        for row, each in enumerate(placed):
            for table, pages in zip(tables, (each.pages, each.head_pages), strict=True):
                # Larger trees may have had more than rounds of this shape reach.
                table[row, : len(pages)] = pages[: table.shape[1]]
        columns = [sampling_columns(each.sampling) for each in placed]
        self._write(list(sequences), [each.numbers(width) for each in placed], columns, tables)

    def clear(self, slots: Sequence[int]) -> None:
        """Takes the sequences out of slots."""
        count, width = len(slots), self.open_tokens.shape[1]
        columns = [sampling_columns(_GREEDY)] * count
        self._write(slots, [empty_number_row(width)] * count, columns, self._no_pages(count))

    def set_pages(self, pages: Sequence[NewPage], head_pages: Sequence[NewPage]) -> None:
        """Writes pages that slots have got, as far as rounds reach, with one copy from the host."""
        width = self.page_table.shape[1]
        parts = [
            np.array([each for each in new if each[1] < width], np.int64).reshape(-1, 3)
            for new in (pages, head_pages)
        ]
        tables = (self.page_table, self.head_page_table)
        uploads = uploaded([part.T.copy() for part in parts], self.numbers.device)
        for table, part in zip(tables, uploads, strict=True):
            if part.shape[1]:
                table.index_put_((part[0], part[1]), part[2].int())

    def _no_pages(self, num_slots: int) -> Array:
        """Returns page tables of the host, `[2, num_slots, P]`."""
        return np.full((2, num_slots, self.page_table.shape[1]), PADDING_PAGE, np.int32)

    def _write(
        self,
        slots: Sequence[int],
        numbers: Sequence[Sequence[int]],
        sampling: Sequence[Sequence[float]],
        tables: Array,
    ) -> None:
        """Writes slots without waiting: work already queued on the device reads what was there."""
        as_numbers = np.array(sampling, np.float64).view(np.int64)
        rows = [np.array(numbers, np.int64), as_numbers, *tables]
        index, own, columns, *pages = uploaded(
            [np.array(slots, np.int64), *rows], self.numbers.device
        )
        self.numbers.index_copy_(0, index, own)
        self.sampling.index_copy_(0, index, columns.view(torch.float64))
        self.page_table.index_copy_(0, index, pages[0])
        self.head_page_table.index_copy_(0, index, pages[1])


_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SlotSequence:
    """The part of a sequence that its slot holds.

    Attributes:
        num_tokens: committed.
        pages: the target's, in logical order.
        head_pages: the head's.
    """

    num_tokens: int
    last_token_id: int
    sampling: SamplingParams
    pages: Sequence[int]
    head_pages: Sequence[int]

    def numbers(self, max_open_rows: int) -> list[int]:
        """Returns its row of `RoundState.numbers`."""
        row = _number_row((self.last_token_id,), signed_seed(self.sampling.seed), max_open_rows)
        row[LENGTH], row[ACTIVE] = self.num_tokens, 1
        return row


def empty_number_row(max_open_rows: int) -> list[int]:
    """Returns the numbers of a slot without a sequence."""
    return _number_row((), 0, max_open_rows)


def _number_row(tokens: Sequence[int], seed: int, max_open_rows: int) -> list[int]:
    padding = [0] * (max_open_rows - len(tokens))
    return [_EMPTY_LENGTH, _EMPTY_OPEN, 0, seed, 0, 0, *tokens, *padding]
