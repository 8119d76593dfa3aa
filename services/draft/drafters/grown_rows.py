"""The rows that one pass of the device computed behind a token, and what may follow each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from services.draft.drafters.tail import Tail
from services.draft.likely_verdicts import Continuation
from shared.runtime.growing_trees import PassRows, PassTree
from shared.tokens import TokenTree

Path = tuple[int, ...]
"""Tokens behind the last committed one."""


class GrownRows:
    """Rows by the tokens on the way to them.

    Attributes:
        tree: the best nodes, whose rows are here but for the less likely leaves.
    """

    def __init__(self, grown: PassTree) -> None:
        self.tree = grown.tree
        self._levels, self._rows = grown.levels, grown.rows

    def line(self, path: Path) -> tuple[int, ...]:
        """Returns the rows on the way to a computed node, its own last."""
        return self._lines[path]

    def after(self, path: Path) -> Sequence[Continuation]:
        """Returns the best tokens after a node, best first; none after one that is not computed."""
        line = self._lines.get(path)
        return () if line is None else self._rows.after(line[-1] + 1 if line else 0)

    def row(self, path: Path) -> tuple[PassRows, int]:
        """Returns the row of a computed node among all that its pass computed."""
        line = self._lines[path]
        return self._rows, line[-1] + 1 if line else 0

    def tail(self, base: int, last_token: int) -> Tail:
        """Returns the rows as the tail of a sequence, row 0 being at index `base`."""
        tail = Tail(base, last_token)
        above = [tail.root]
        for token_ids, parents in self._levels:
            above = [
                tail.add(above[place], token)
                for token, place in zip(token_ids, parents, strict=True)
            ]
        return tail

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


def paths_of(tree: TokenTree) -> Iterator[Path]:
    """Yields the path of the last committed token, then of each node of a tree behind it."""
    paths: list[Path] = [()]
    yield ()
    for token, parent in zip(tree.token_ids, tree.parent_indices, strict=True):
        paths.append((*paths[0 if parent is None else parent + 1], token))
        yield paths[-1]
