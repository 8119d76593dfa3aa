"""Feature rows of one sequence that the draft head has not used up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from services.draft.events import FeatureRows


class FeatureBuffer:
    """Rows of the positions `[start, end)`, in the pieces they came in.

    Attributes:
        end: the position after the last row that ever came.
    """

    __slots__ = ("_pieces", "end")

    def __init__(self) -> None:
        # With the positions that each begins and ends at: a tensor is slow to tell its length.
        self._pieces: deque[tuple[int, int, Tensor]] = deque()
        self.end = 0

    @property
    def start(self) -> int:
        """The first position held; `end` when none is."""
        return self._pieces[0][0] if self._pieces else self.end

    def append(self, rows: FeatureRows) -> None:
        """Takes rows in; those it has had already are left out. After a gap everything before it
        is dropped, because a head cannot step over a position."""
        start, piece = rows.position_offset, rows.rows
        end = start + piece.shape[0]
        if start > self.end:
            self._pieces.clear()
        elif start < self.end:
            start, piece = self.end, piece[self.end - start :]
        if end > start:
            self._pieces.append((start, end, piece))
        self.end = max(start, end)

    def drop_before(self, position: int) -> None:
        """Frees pieces that end at `position` or before it."""
        while self._pieces and self._pieces[0][1] <= position:
            self._pieces.popleft()

    def read(self, start: int, count: int) -> Iterator[Tensor]:
        """Yields the rows of `[start, start + count)`, piece by piece; all must be held."""
        end = start + count
        assert self.start <= start <= end <= self.end, "these rows are not here"
        for first, last, piece in self._pieces:
            if end <= first:
                return
            if start <= first and last <= end:
                yield piece
            elif start < last:
                yield piece[max(start - first, 0) : end - first]
