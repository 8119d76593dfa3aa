"""The rows behind the committed tokens of one sequence: those of a tree, level by level.

*Row r* of a tail is the KV at index `base + r`, where committed rows end. Rows lie in the order
they were computed, so a parent's is below its child's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

Path = tuple[int, ...]
"""Tokens behind the last committed one."""


class TailRows:
    """Rows by the tokens on the way to them.

    Args:
        levels: for each level the tokens of its rows, and the place of each one's parent in the
            level before.
    """

    def __init__(self, levels: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        self._levels = levels

    def line(self, path: Path) -> tuple[int, ...]:
        """Returns the rows on the way to a computed node, its own last."""
        return self._lines[path]

    def matched(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the rows of the longest path whose tokens begin `token_ids`."""
        path = tuple(token_ids)
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]

    @cached_property
    def _lines(self) -> dict[Path, tuple[int, ...]]:
        # Most trees are for verdicts that do not fall, and nobody asks for their rows.
        lines: dict[Path, tuple[int, ...]] = {(): ()}
        above: list[Path] = [()]
        row = 0
        for token_ids, parents in self._levels:
            paths = [
                (*above[place], token) for token, place in zip(token_ids, parents, strict=True)
            ]
            for path in paths:
                lines.setdefault(path, (*lines[path[:-1]], row))
                row += 1
            above = paths
        return lines
