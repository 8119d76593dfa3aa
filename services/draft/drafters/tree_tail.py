"""The tree rows of one sequence behind its committed tokens, level by level."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.drafters.draft_kv import GrownRows, SequenceKv
from shared.kv.batch import SequenceRows
from shared.speculation.growth import Beam


class TreeTail:
    """Lays out each beam of a growing tree as the next rows of the sequence's KV tail.

    Attributes:
        grown: the rows laid out so far.
        paths: tree tokens on the path of each node of the last beam, its own included.
    """

    def __init__(self, kv: SequenceKv) -> None:
        self.grown = GrownRows(base=kv.num_computed)
        self.paths: list[tuple[int, ...]] = [()]
        self._pages = kv.lease.pages
        self._beam_rows: list[int | None] = [None]

    def extend(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        visible: Sequence[Sequence[bool]],
    ) -> SequenceRows:
        """Lays out the rows of the next beam, all with logits.

        Args:
            token_ids: the beam, K nodes.
            parents: place of each node's parent in the beam before; 0 is the root at first.
            visible: K rows over all tail rows, the new ones included.
        """
        first_row, depth = self.grown.num_rows, len(self.paths[0])
        above = [self._beam_rows[place] for place in parents]
        nodes = list(zip(above, token_ids, strict=True))
        self._beam_rows = [self.grown.add(parent, token) for parent, token in nodes]
        self.paths = [
            (*self.paths[place], token) for place, token in zip(parents, token_ids, strict=True)
        ]
        return SequenceRows(
            token_ids=token_ids,
            positions=[self.grown.base + depth] * len(nodes),
            kv_start=self.grown.base + first_row,
            pages=self._pages,
            prefix_length=self.grown.base,
            # A chain is causal.
            tail_mask=None if len(nodes) == 1 else visible,
            logit_rows=range(len(nodes)),
        )


def beam_rows(beam: Beam, tails: Sequence[TreeTail]) -> list[SequenceRows]:
    """Lays out the beam of each tree. Waits for the device once a level: the host lays out the
    rows."""
    token_ids, parents, visible = (
        tensor.tolist() for tensor in (beam.token_ids, beam.parents, beam.visible)
    )
    return [
        tail.extend(*level) for tail, *level in zip(tails, token_ids, parents, visible, strict=True)
    ]
