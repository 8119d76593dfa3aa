"""Columns of a message: checked, so that entry i of each belongs together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidArgument
from shared.rpc.trees import shape_from_message, shape_message
from shared.tokens import TreeShape

T = TypeVar("T")
Refusal = Callable[[str], InvalidArgument]
"""Makes the error for columns that do not fit together."""


class ColumnReader:
    """Reads the columns of one message.

    Args:
        count: entries of each column.
        refusal: makes the error from its message.
    """

    def __init__(self, message: Any, count: int, refusal: Refusal) -> None:
        self._message = message
        self._count = count
        self._refusal = refusal

    def required(self, name: str) -> list[Any]:
        """Returns a column.

        Raises:
            InvalidArgument: it is not as long as the others.
        """
        # A slice copies a repeated field in one call; iterating it costs a call an element.
        column: list[Any] = getattr(self._message, name)[:]
        if len(column) != self._count:
            raise self._refusal(f"{name} has {len(column)} entries; it must have {self._count}")
        return column

    def optional(self, name: str, absent: T) -> list[T]:
        """Returns a column that may be empty: then each entry is `absent`.

        Raises:
            InvalidArgument: it is neither empty nor as long as the others.
        """
        return self.required(name) if getattr(self._message, name) else [absent] * self._count

    def offsets(self, name: str, *columns: str) -> list[int]:
        """Returns the column that says where the entries of each begin in others.

        Raises:
            InvalidArgument: it does not ascend from 0 to the length of those others.
        """
        offsets: list[int] = getattr(self._message, name)[:]
        if not self._count and not offsets:
            offsets = [0]
        if len(offsets) != self._count + 1:
            raise self._refusal(
                f"{name} has {len(offsets)} entries; it must have one more than "
                f"there are sequence ids, {self._count + 1}"
            )
        if offsets[0] != 0:
            raise self._refusal(f"{name} begins at {offsets[0]}; it must begin at 0")
        for place in np.flatnonzero(np.diff(offsets) < 0)[:1].tolist():
            raise self._refusal(
                f"{name} descends from {offsets[place]} to {offsets[place + 1]} at {place + 1}"
            )
        for column in columns:
            length = len(getattr(self._message, column))
            if length != offsets[-1]:
                raise self._refusal(f"{name} ends at {offsets[-1]}; {column} has {length} entries")
        return offsets

    def array(self, name: str, dtype: type[Any]) -> NDArray[Any]:
        """Returns a column of numbers without an object for each."""
        return np.array(getattr(self._message, name), dtype)

    def shapes(self, numbers: str, shapes: str) -> list[TreeShape | None]:
        """Returns a column of shapes, each named by its number in another one.

        Raises:
            InvalidArgument: there is no such shape, or it is out of range.
        """
        found = [None, *map(shape_from_message, getattr(self._message, shapes))]
        chosen = self.optional(numbers, 0)
        for number in chosen:
            if not 0 <= number < len(found):
                raise self._refusal(f"{numbers} holds {number}; {shapes} has {len(found) - 1}")
        return [found[number] for number in chosen]


def add_shapes(shapes: Sequence[TreeShape | None], numbers: Any, messages: Any) -> None:
    """Puts shapes into two columns of a message: each once, and the number of each."""
    if not any(shapes):
        return
    distinct = dict.fromkeys(each for each in shapes if each is not None)
    places: dict[TreeShape | None, int] = {each: place for place, each in enumerate(distinct, 1)}
    places[None] = 0
    messages.extend(map(shape_message, distinct))
    numbers.extend([places[each] for each in shapes])


def add_optional(column: Any, values: Sequence[T], absent: T) -> None:
    """Fills a column, unless each value is `absent`."""
    if any(each != absent for each in values):
        column.extend(values)
