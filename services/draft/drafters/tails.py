"""The rows behind the committed tokens of one sequence: those of a tree, level by level.

*Row r* of a tail is the KV at index `base + r`, where committed rows end. Rows lie in the order
they were computed, so a parent's is below its child's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from shared.kv.batch import SequenceRows
from shared.speculation.tree import Beam, BeamRows

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


class TreeTail(TailRows):
    """Lays out each beam of a growing tree as the next rows of the sequence's KV tail.

    Attributes:
        paths: tree tokens on the path of each node of the last beam, its own included.
    """

    def __init__(self, base: int, pages: Sequence[int]) -> None:
        self._grown: list[tuple[Sequence[int], Sequence[int]]] = []
        super().__init__(self._grown)
        self.paths: list[Path] = [()]
        self._base, self._pages, self._num_rows = base, pages, 0

    def extend(self, beam: BeamRows) -> SequenceRows:
        """Lays out the rows of the next beam, all with logits."""
        token_ids, parents = beam.token_ids, beam.parents
        first_row, depth = self._num_rows, len(self.paths[0])
        self._num_rows += len(token_ids)
        self._grown.append((token_ids, parents))
        self.paths = [
            (*self.paths[place], token) for place, token in zip(parents, token_ids, strict=True)
        ]
        return SequenceRows(
            token_ids=token_ids,
            positions=[self._base + depth] * len(token_ids),
            kv_start=self._base + first_row,
            pages=self._pages,
            prefix_length=self._base,
            # A chain is causal.
            tail_mask=None if len(token_ids) == 1 else beam.visible,
            logit_rows=range(len(token_ids)),
        )


def beam_rows(beam: Beam, tails: Sequence[TreeTail]) -> list[SequenceRows]:
    """Lays out the beam of each tree. Waits for the device once a level: the host lays out the
    rows."""
    return [tail.extend(own) for tail, own in zip(tails, beam.on_host(), strict=True)]
