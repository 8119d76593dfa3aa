"""Hidden states on their way to a draft, and who sends them. No torch at run time, so that policies
can carry them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from shared.runtime.ring_memory import FeatureRingWriter


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows:
    """Features of consecutive committed positions of one sequence.

    Attributes:
        position_offset: position of the first row.
        rows: `[R, W]`, in the dtype the draft asked for, on any device.
        num_prompt_tokens: where the prompt of the sequence ends.
        ring_start: number of the first row in the ring of the draft; None when they are not there.
    """

    sequence_id: int
    position_offset: int
    rows: Tensor
    num_prompt_tokens: int
    ring_start: int | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return self.rows.shape[0]  # several times as fast as its length

    @property
    def completes_prompt(self) -> bool:
        """Whether no prompt row but the last, which comes with its verdict, is left to send."""
        return self.end >= self.num_prompt_tokens - 1

    def split(self, num_last: int) -> tuple[FeatureRows, FeatureRows]:
        """Returns the rows before the last `num_last`, and those."""
        num_before = max(self.num_rows - num_last, 0)
        return (
            replace(self, rows=self.rows[:num_before]),
            replace(
                self,
                position_offset=self.position_offset + num_before,
                rows=self.rows[num_before:],
                ring_start=None if self.ring_start is None else self.ring_start + num_before,
            ),
        )

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.position_offset + self.num_rows


# Senders of hidden states to a draft: in this process, in messages, or through shared memory.


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRows:
    """Rows at the place where the draft reads them.

    Attributes:
        rows: `[R, W]`.
        ring_start: number of the first one in the draft's ring; None when they are not there.
    """

    rows: Tensor
    ring_start: int | None = None


class HiddenStateSender(Protocol):
    """Called on the engine thread.

    Attributes:
        hands_over: whether the copy is complete when `place` returns, rather than queued.
    """

    @property
    def hands_over(self) -> bool: ...

    def place(self, rows: Tensor) -> PlacedRows:
        """Puts rows `[R, W]` of the target's device where the draft can read them."""


class InProcessSender:
    """The draft is in this process: rows stay on the device."""

    hands_over = False

    def place(self, rows: Tensor) -> PlacedRows:
        return PlacedRows(rows)


class InlineSender:
    """Rows travel as bytes in messages."""

    hands_over = True

    def place(self, rows: Tensor) -> PlacedRows:
        return PlacedRows(rows.cpu())


class RingSender:
    """Rows go into memory shared with the draft, or as bytes in messages while that is full."""

    hands_over = True

    def __init__(self, ring: FeatureRingWriter) -> None:
        self._ring = ring

    def place(self, rows: Tensor) -> PlacedRows:
        start = self._ring.write(rows)
        return PlacedRows(rows.cpu()) if start is None else PlacedRows(rows, start)
