"""Feature rows of one sequence that the draft head has not used up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from services.draft.events import FeatureRows


class FeatureBuffer:
    """Rows of the positions `[start, end)`, in the pieces they came in."""

    def __init__(self) -> None:
        self._pieces: deque[FeatureRows] = deque()
        self._end = 0

    @property
    def start(self) -> int:
        """The first position held; `end` when none is."""
        return self._pieces[0].position_offset if self._pieces else self._end

    @property
    def end(self) -> int:
        """The position after the last row that ever came."""
        return self._end

    def append(self, rows: FeatureRows) -> None:
        """Takes rows in; those it has had already are left out. After a gap everything before it
        is dropped, because a head cannot step over a position."""
        if rows.position_offset > self._end:
            self._pieces.clear()
            self._end = rows.position_offset
        num_known = self._end - rows.position_offset
        new = FeatureRows(self._end, rows.rows[num_known:]) if num_known else rows
        if len(new.rows):
            self._pieces.append(new)
            self._end += len(new.rows)

    def drop_before(self, position: int) -> None:
        """Frees pieces that end at `position` or before it."""
        while self._pieces and _end_of(self._pieces[0]) <= position:
            self._pieces.popleft()

    def read(self, start: int, count: int) -> Iterator[Tensor]:
        """Yields the rows of `[start, start + count)`, piece by piece; all must be held."""
        assert self.start <= start <= start + count <= self._end, "these rows are not here"
        for piece in self._pieces:
            first = max(start - piece.position_offset, 0)
            last = start + count - piece.position_offset
            if last <= 0:
                return
            if first < len(piece.rows):
                yield piece.rows[first:last]


def _end_of(piece: FeatureRows) -> int:
    return piece.position_offset + len(piece.rows)
