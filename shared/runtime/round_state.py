"""What speculative rounds keep of their sequences on the device, one *slot* a sequence.

A round reads it, and its last kernel writes what the next round starts from, so rounds follow one
another without the host. A slot without a sequence computes in the padding page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.pages import PADDING_PAGE
from shared.speculation.row_sampling import sampling_columns, signed_seed
from shared.tokens import SamplingParams

LENGTH, OPEN, ACTIVE, SEED, TAIL = range(5)
"""Columns of `RoundState.numbers`; the tail takes the rest."""
# The least that a forward can compute: one open row behind one token.
_EMPTY_LENGTH, _EMPTY_OPEN = 2, 1


@dataclass(frozen=True, slots=True, eq=False)
class RoundState:
    """S slots. Columns are views of the first two tensors, so that a slot is written by few copies.

    Attributes:
        numbers: `[S, 4 + W]` int64; see the properties.
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
        """`[S]` int64, 1 where the slot has a sequence, else 0."""
        return self.numbers[:, ACTIVE]

    @property
    def seeds(self) -> Tensor:
        """`[S]` int64."""
        return self.numbers[:, SEED]

    @property
    def open_tokens(self) -> Tensor:
        """`[S, W]` int64, the last `num_open` committed tokens in order, then anything."""
        return self.numbers[:, TAIL:]

    @property
    def num_slots(self) -> int:
        return len(self.numbers)

    def first(self, num_slots: int) -> RoundState:
        """Returns a view of the first slots."""
        return RoundState(
            self.numbers[:num_slots],
            self.sampling[:num_slots],
            self.page_table[:num_slots],
            self.head_page_table[:num_slots],
        )

    def emptied(self) -> RoundState:
        """Returns a state of as many slots, without sequences."""
        num_open, num_pages = self.open_tokens.shape[1], self.page_table.shape[1]
        return RoundState.empty(
            self.num_slots, max_open_rows=num_open, num_pages=num_pages, device=self.numbers.device
        )

    def place(
        self, slot: int, *, num_tokens: int, last_token_id: int, sampling: SamplingParams
    ) -> None:
        """Puts a sequence into a slot, its head's rows computed but for the last one."""
        row = _number_row((last_token_id,), signed_seed(sampling.seed), self.open_tokens.shape[1])
        row[LENGTH], row[ACTIVE] = num_tokens, 1
        _upload(self.numbers[slot], torch.tensor(row))
        columns = torch.tensor(sampling_columns(sampling), dtype=torch.float64)
        _upload(self.sampling[slot], columns)

    def clear(self, slot: int) -> None:
        """Takes the sequence out of a slot."""
        _upload(self.numbers[slot], torch.tensor(_number_row((), 0, self.open_tokens.shape[1])))
        columns = torch.tensor(sampling_columns(_GREEDY), dtype=torch.float64)
        _upload(self.sampling[slot], columns)
        for table in (self.page_table, self.head_page_table):
            _upload(table[slot], torch.full_like(table[slot], PADDING_PAGE, device="cpu"))

    def set_pages(self, slot: int, first: int, pages: Sequence[int], *, of_head: bool) -> None:
        """Writes the pages of a slot from the `first`-th on."""
        table = self.head_page_table if of_head else self.page_table
        if pages:
            row = table[slot, first : first + len(pages)]
            _upload(row, torch.tensor(list(pages), dtype=torch.int32))


_GREEDY = SamplingParams(temperature=0.0)


def _number_row(tokens: Sequence[int], seed: int, max_open_rows: int) -> list[int]:
    padding = [0] * (max_open_rows - len(tokens))
    return [_EMPTY_LENGTH, _EMPTY_OPEN, 0, seed, *tokens, *padding]


def _upload(target: Tensor, host: Tensor) -> None:
    """Copies without waiting: work already queued on the device reads the values before."""
    if target.is_cuda:
        # The pinned block is not given out again before the copy has run.
        target.copy_(host.pin_memory(), non_blocking=True)
    else:
        target.copy_(host)
