"""The rows of one sequence in each layer of a head of several next-token layers.

*Row i* of layer k reads the token at i + 1 + k and the state of row i of layer k - 1, so each
layer has one committed row fewer than the one before it, and the rows of a tree follow them. A
node's row reads the state that its parent left in the layer before; the root's is the last
committed row.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.drafters.draft_kv import SequenceKv
from shared.kv.batch import SequenceRows
from shared.speculation.growth import BeamRows


class LayerRows:
    """Lays out the committed rows that are still open, and a growing tree, for every layer.

    Attributes:
        paths: tree tokens on the path of each node of the last beam, its own included.
    """

    def __init__(self, kv: SequenceKv, token_ids: Sequence[int]) -> None:
        """`token_ids` are all committed tokens of the sequence."""
        self.paths: list[tuple[int, ...]] = [()]
        self._pages = kv.lease.pages
        self._start = kv.num_computed
        self._tokens = token_ids[kv.window_start + kv.num_computed + 1 :]
        self._tree_tokens: list[int] = []
        self._parents: list[int | None] = []
        self._depths: list[int] = []
        self._visible: list[Sequence[bool]] = []
        self._beam_rows: list[int | None] = [None]

    def num_committed(self, layer: int) -> int:
        """Returns the open committed rows of a layer."""
        return len(self._tokens) - layer

    def add_beam(self, beam: BeamRows) -> None:
        """Takes the next beam of the tree."""
        token_ids, parents = beam.token_ids, beam.parents
        first, depth = len(self._tree_tokens), len(self.paths[0]) + 1
        self._parents += [self._beam_rows[place] for place in parents]
        self._tree_tokens += token_ids
        self._depths += [depth] * len(token_ids)
        self._visible += beam.visible
        self._beam_rows = list(range(first, first + len(token_ids)))
        self.paths = [
            (*self.paths[place], token) for place, token in zip(parents, token_ids, strict=True)
        ]

    def all_rows(self, layer: int) -> SequenceRows:
        """Returns the open committed rows of a layer, then every node so far."""
        base = self.num_committed(layer)
        return SequenceRows(
            token_ids=[*self._tokens[layer:], *self._tree_tokens],
            positions=[
                *range(self._start, self._start + base),
                *(self._start + base - 1 + depth for depth in self._depths),
            ],
            kv_start=self._start,
            pages=self._pages,
            prefix_length=self._start,
            tail_mask=self._whole_mask(base) if self._has_siblings else None,
            logit_rows=(),
        )

    def sources(self, layer: int) -> list[int]:
        """Returns, for each of `all_rows(layer)`, the row among `all_rows(layer - 1)` whose state
        it reads."""
        base = self.num_committed(layer - 1)
        root = base - 1
        nodes = [root if parent is None else base + parent for parent in self._parents]
        return [*range(self.num_committed(layer)), *nodes]

    def beam_rows(self, layer: int) -> SequenceRows:
        """Returns the last beam's rows alone; the layer has computed all before them."""
        num_rows = len(self.paths)
        base = self._start + self.num_committed(layer)
        return SequenceRows(
            token_ids=self._tree_tokens[-num_rows:],
            positions=[base - 1 + depth for depth in self._depths[-num_rows:]],
            kv_start=base + len(self._tree_tokens) - num_rows,
            pages=self._pages,
            prefix_length=base,
            tail_mask=self._visible[-num_rows:] if self._has_siblings else None,
            logit_rows=(),
        )

    @property
    def _has_siblings(self) -> bool:
        """Whether causality is not the whole truth."""
        return len(self.paths) > 1

    def _whole_mask(self, base: int) -> list[list[bool]]:
        width = len(self._tree_tokens)
        committed = [[i <= row for i in range(base)] + [False] * width for row in range(base)]
        nodes = [
            [True] * base + [*visible, *[False] * (width - len(visible))]
            for visible in self._visible
        ]
        return committed + nodes
