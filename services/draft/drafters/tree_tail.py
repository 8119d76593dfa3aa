"""The tree rows of one sequence behind its committed tokens, level by level."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.draft.drafters.draft_kv import SequenceKv
from services.draft.drafters.tail import Tail, TailNode
from shared.kv.batch import SequenceRows
from shared.speculation.growth import Beam, BeamRows, Children


class TreeTail:
    """Lays out each beam of a growing tree as the next rows of the sequence's KV tail.

    Attributes:
        tail: the rows laid out so far.
        paths: tree tokens on the path of each node of the last beam, its own included.
    """

    def __init__(self, kv: SequenceKv, last_token: int) -> None:
        self.tail = Tail(kv.num_computed, last_token)
        self.paths: list[tuple[int, ...]] = [()]
        self._pages = kv.lease.pages
        self._beams: list[list[TailNode]] = [[self.tail.root]]

    def extend(self, beam: BeamRows) -> SequenceRows:
        """Lays out the rows of the next beam, all with logits."""
        token_ids, parents = beam.token_ids, beam.parents
        first_row, depth = self.tail.num_rows, len(self.paths[0])
        above = [self._beams[-1][place] for place in parents]
        nodes = [self.tail.add(node, token) for node, token in zip(above, token_ids, strict=True)]
        self._beams.append(nodes)
        self.paths = [
            (*self.paths[place], token) for place, token in zip(parents, token_ids, strict=True)
        ]
        return SequenceRows(
            token_ids=token_ids,
            positions=[self.tail.base + depth] * len(nodes),
            kv_start=self.tail.base + first_row,
            pages=self._pages,
            prefix_length=self.tail.base,
            # A chain is causal.
            tail_mask=None if len(nodes) == 1 else beam.visible,
            logit_rows=range(len(nodes)),
        )

    def keep_states(self, states: Sequence[Sequence[Tensor]]) -> None:
        """Takes the states of a head's rows: one entry a level, in it one a node."""
        for nodes, level in zip(self._beams, states, strict=True):
            for node, state in zip(nodes, level, strict=True):
                node.state = state

    def learn(self, levels: Sequence[Sequence[Sequence[tuple[int, float]]]]) -> None:
        """Takes the best tokens after each row: one entry a level, in it one a node."""
        for nodes, level in zip(self._beams, levels, strict=True):
            for node, continuations in zip(nodes, level, strict=True):
                node.learn(continuations)


def beam_rows(beam: Beam, tails: Sequence[TreeTail]) -> list[SequenceRows]:
    """Lays out the beam of each tree. Waits for the device once a level: the host lays out the
    rows."""
    return [tail.extend(own) for tail, own in zip(tails, beam.on_host(), strict=True)]


def learn_levels(tails: Sequence[TreeTail], levels: Sequence[Children]) -> None:
    """Hands the best tokens after each row to the tails. Waits for the device."""
    for tail, *own in zip(tails, *(level.on_host() for level in levels), strict=True):
        tail.learn(own)
