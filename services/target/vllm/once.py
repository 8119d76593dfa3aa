"""A value that is made on a thread when somebody first wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Makes a value at most once, however many ask for it and give up. On the event loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """Returns the value.

        Raises:
            Exception: what making it raised, every time.
        """
        if self._made is None:
            self._made = asyncio.ensure_future(asyncio.to_thread(self._make))
            self._made.add_done_callback(_note_exception)
        return await asyncio.shield(self._made)


def _note_exception(made: asyncio.Future[T]) -> None:
    """Marks a failure as seen: whoever asked may have given up."""
    if not made.cancelled():
        made.exception()
