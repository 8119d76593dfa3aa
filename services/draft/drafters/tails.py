"""The rows behind the committed tokens of one sequence: those of a tree, level by level.

*Row r* of a tail is the KV at index `base + r`, where committed rows end. Rows lie in the order
they were computed, so a parent's is below its child's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from services.draft.likely_verdicts import Continuation
from shared.runtime.tree_pass import PassRows, PassTree

Path = tuple[int, ...]
"""Tokens behind the last committed one."""


class GrownRows:
    """What a pass has computed, by the tokens on the way to each row.

    Attributes:
        tree: the best nodes, whose rows are here but for the less likely leaves.
    """

    def __init__(self, grown: PassTree) -> None:
        self.tree = grown.tree
        self._levels, self._rows = grown.levels, grown.rows

    def line(self, path: Path) -> tuple[int, ...]:
        """Returns the rows on the way to a computed node, its own last."""
        return self._lines[path]

    def matched(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the rows of the longest path whose tokens begin `token_ids`."""
        path = tuple(token_ids)
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]

    def after(self, path: Path) -> Sequence[Continuation]:
        """Returns the best tokens after a node, best first; none after one that is not computed."""
        line = self._lines.get(path)
        return () if line is None else self._rows.after(line[-1] + 1 if line else 0)

    def row(self, path: Path) -> tuple[PassRows, int]:
        """Returns the row of a computed node among all that its pass computed."""
        line = self._lines[path]
        return self._rows, line[-1] + 1 if line else 0

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
