"""A sequence that takes part in rounds on the device, or did before the general path took over."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.target.sequence import Sequence
from shared.runtime.round_sequences import Newcomer


@dataclass(slots=True)
class Guest:
    """What rounds keep of a sequence while it lives.

    Attributes:
        head_pages: the head's, in logical order.
        num_head_rows: rows of the head that are computed.
    """

    sequence: Sequence
    head_pages: list[int] = field(default_factory=list)
    num_head_rows: int = 0

    @property
    def newcomer(self) -> Newcomer:
        """What places it; the head lacks one row at least, from which a tree starts."""
        sequence = self.sequence
        return Newcomer(
            sequence.sequence_id,
            sequence.token_ids,
            sequence.sampling,
            pages=sequence.open_lease.pages,
            head_pages=self.head_pages,
            num_head_rows=min(self.num_head_rows, len(sequence.token_ids) - 2),
        )
