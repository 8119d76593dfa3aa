"""The free list of KV pages. Plain integers, no torch."""

from __future__ import annotations

from collections.abc import Iterable

PADDING_PAGE = 0
"""Never allocated: padded rows and padded page-table columns point at it."""


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was allocated."""

    def __init__(self, num_wanted: int, num_free: int) -> None:
        super().__init__(f"{num_wanted} pages wanted; {num_free} are free")
        self.num_wanted = num_wanted
        self.num_free = num_free


class PagePool:
    """Owns the pages `[1, num_pages)`, or some of them; each is either free or held by exactly one
    holder."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "one padding page and at least one live page"
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._is_free = bytearray([0, *[1] * (num_pages - 1)])
        self.num_pages = num_pages - 1

    @classmethod
    def of(cls, pages: Iterable[int]) -> PagePool:
        """Returns a pool of the given pages."""
        owned = list(pages)
        pool = cls(max(owned, default=PADDING_PAGE + 1) + 1)
        pool._free = owned[::-1]
        pool._is_free = bytearray(len(pool._is_free))
        for page in owned:
            pool._is_free[page] = 1
        pool.num_pages = len(owned)
        return pool

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages.

        Raises:
            OutOfPages: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back; each must be held by the caller alone."""
        for page in pages:
            assert not self._is_free[page], f"page {page} released twice"
            self._is_free[page] = 1
            self._free.append(page)
