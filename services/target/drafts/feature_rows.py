"""Hidden states on their way to a draft. No torch at run time, so that policies can carry them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
