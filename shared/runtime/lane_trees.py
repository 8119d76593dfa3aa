"""Lanes whose draws the host restricts: trees on their way to it, and masks on their way back.

A grammar is followed on the host. It sees the trees as soon as they have grown, and computes the
masks of their rows while the target computes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kv.upload import uploaded
from shared.runtime.host_copy import HostCopy, PinnedMemory
from shared.speculation.row_masks import MaskedRows, mask_logits
from shared.speculation.tree import NO_TOKEN, TreeRows
from shared.tokens import TokenTree

LaneMasks = Mapping[int, MaskedRows]
"""By lane, masks of rows of its tree."""


@dataclass(frozen=True, slots=True)
class LaneTree:
    """The tree of one lane.

    Attributes:
        rows: of the root, and of each node; the tree may have fewer nodes than rows.
    """

    tree: TokenTree
    rows: Sequence[int]

    @classmethod
    def of(cls, token_ids: Sequence[int], parents: Sequence[int] | None) -> LaneTree:
        """Args:
        token_ids: of all rows, the root's first; -1 where there is no node.
        parents: the row of each row's parent; None of a chain.
        """
        rows = [0, *(row for row in range(1, len(token_ids)) if token_ids[row] != NO_TOKEN)]
        tokens = tuple(token_ids[row] for row in rows[1:])
        if parents is None:
            return cls(TokenTree.chain(tokens), rows)
        nodes = {row: node for node, row in enumerate(rows, -1)}
        above = tuple(nodes[parents[row]] if parents[row] else None for row in rows[1:])
        return cls(TokenTree(tokens, above), rows)


class TreeCopies:
    """Copies trees to the host, those of one round at a time.

    Args:
        max_rows: of all trees of a round.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._memory: list[PinnedMemory | None] = [None, None]
        if device.type == "cuda":
            self._memory = [PinnedMemory(max_rows, torch.int64) for _ in range(2)]

    def queue(self, trees: TreeRows, *, are_chains: bool) -> QueuedTrees:
        """Queues the copy of all trees."""
        tokens, parents = self._memory
        return QueuedTrees(
            HostCopy(trees.token_ids, tokens),
            None if are_chains else HostCopy(trees.parents, parents),
        )


@dataclass(frozen=True, slots=True)
class QueuedTrees:
    """Trees on their way to the host.

    Attributes:
        parents: None of chains.
    """

    tokens: HostCopy
    parents: HostCopy | None

    def read(self, slots: Sequence[int]) -> list[LaneTree]:
        """Waits for the device; returns the trees of some slots."""
        tokens = self.tokens.read()
        parents = None if self.parents is None else self.parents.read()
        return [
            LaneTree.of(tokens[slot].tolist(), None if parents is None else parents[slot].tolist())
            for slot in slots
        ]


@dataclass(frozen=True, slots=True)
class AppliedMasks:
    """Logits without the tokens that lanes may not draw.

    Attributes:
        barred: `[K]` int64, rows that must not draw.
        scored: rows whose logits are wanted as they were, and these; None where no lane wants any.
    """

    logits: Tensor
    barred: Tensor
    scored: tuple[Tensor, Tensor] | None

    @classmethod
    def of(
        cls, logits: Tensor, masks: LaneMasks, num_rows: int, scored: Sequence[int]
    ) -> AppliedMasks:
        """Applies masks in place.

        Args:
            logits: `[S * T, V]`.
            masks: by slot.
            num_rows: T.
            scored: slots whose log probabilities are wanted.
        """
        joined = MaskedRows.joined([own.behind(slot * num_rows) for slot, own in masks.items()])
        rows, words = np.array(joined.rows, np.int64), joined.words
        may_draw = words.any(axis=1)
        # A root draws in any case: where nothing can follow, its sequence ends.
        is_barred = ~may_draw & (rows % num_rows > 0)
        own = [slot * num_rows + row for slot in scored for row in range(num_rows)]
        arrays = (rows[may_draw], words[may_draw], rows[is_barred], np.array(own, np.int64))
        places, bits, barred, kept = uploaded(arrays, logits.device)
        raw = (kept, logits.index_select(0, kept)) if own else None
        if len(places):  # else no row of any lane can go on
            mask_logits(logits, places, bits)
        return cls(logits, barred, raw)

    def drawn(self, tokens: Tensor) -> None:
        """Rows have drawn from the logits.

        Args:
            tokens: `[S, T]` int64; -1 is written where a row must not draw.
        """
        if len(self.barred):
            tokens.view(-1).index_fill_(0, self.barred, NO_TOKEN)
        if self.scored is not None:
            self.logits.index_copy_(0, *self.scored)
