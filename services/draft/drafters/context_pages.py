"""Pages of one sequence in a block drafter: a window over the positions before the block.

A position's keys and values are made of its own features alone and stand at its own rotary angle,
so a window slides by letting go of its first pages; nothing is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.kv.pages import PagePool


@dataclass(slots=True, eq=False)
class ContextPages:
    """Keys and values of the positions `[start, end)`, from the beginning of `pages` on.

    Attributes:
        start: the first position that is kept.
        end: the position after the last that is computed.
    """

    page_size: int
    start: int = 0
    end: int = 0
    pages: list[int] = field(default_factory=list)

    def index(self, position: int) -> int:
        """Returns the logical KV index of a position."""
        return position - self.start

    def slots(self, positions: Sequence[int]) -> list[int]:
        size = self.page_size
        indices = [self.index(position) for position in positions]
        return [self.pages[index // size] * size + index % size for index in indices]

    def grow(self, pool: PagePool, end: int) -> None:
        """Makes room for the positions below `end`.

        Raises:
            OutOfPages: there are not enough pages; nothing changed.
        """
        num_missing = -(-self.index(end) // self.page_size) - len(self.pages)
        if num_missing > 0:
            self.pages += pool.allocate(num_missing)

    def trim(self, pool: PagePool, end: int) -> None:
        """Lets go of the pages that hold nothing but positions from `end` on."""
        num_kept = max(-(-self.index(end) // self.page_size), 0)
        pool.release(self.pages[num_kept:])
        del self.pages[num_kept:]

    def slide(self, pool: PagePool, start: int) -> None:
        """Lets whole pages before position `start` go, or all of them if none reaches it."""
        if start >= self.end:
            self.restart(pool, max(start, self.end))
            return
        num_dropped = max(self.index(start) // self.page_size, 0)
        pool.release(self.pages[:num_dropped])
        del self.pages[:num_dropped]
        self.start += num_dropped * self.page_size

    def restart(self, pool: PagePool, start: int) -> None:
        """Lets everything go and begins at `start`."""
        pool.release(self.pages)
        self.pages = []
        self.start = self.end = start
