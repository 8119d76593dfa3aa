"""Prompt tokens that slots compute in place of trees, in the forward of a round.

The end of a prompt that the target has not computed joins a round instead of taking a step of its
own: each chunk of it is a chain in a slot, whose nodes are accepted whatever the target draws. The
last chunk is in the sequence's own slot, and what its last row draws is the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kv.upload import uploaded
from shared.runtime.round_batches import RoundShape, RoundTree
from shared.runtime.round_state import RoundState
from shared.speculation.tree import NO_TOKEN, rows_of_parents


def cut(token_ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """Returns chunks of `size` tokens; the last one has what is left, at least one."""
    return [token_ids[first : first + size] for first in range(0, len(token_ids), size)]


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunks:
    """K slots and their chunks, T rows each.

    Attributes:
        slots: `[K]` int64.
        token_ids: `[K, T]` int64, -1 behind a chunk.
        num_kept: rows of a tree that a slot can commit.
    """

    slots: Tensor
    token_ids: Tensor
    num_kept: int

    @classmethod
    def of(
        cls, chunks: Mapping[int, Sequence[int]], shape: RoundShape, device: torch.device
    ) -> PromptChunks:
        """Returns chunks by slot, none of them longer than what a round of `shape` commits."""
        tokens = np.full((len(chunks), shape.num_tree_rows), NO_TOKEN, np.int64)
        for row, chunk in zip(tokens, chunks.values(), strict=True):
            row[: len(chunk)] = chunk
        slots, token_ids = uploaded([np.array(list(chunks), np.int64), tokens], device)
        return cls(slots, token_ids, shape.max_committed)

    def replace(self, tree: RoundTree, state: RoundState) -> None:
        """Writes the chunks over the trees that have grown in their slots."""
        num_rows, rows, batch = self.token_ids.shape[1], tree.rows, tree.batch
        steps = torch.arange(num_rows, device=self.slots.device)
        # Rows that no path reaches hang off the root.
        parents = torch.where(steps < self.num_kept, steps - 1, 0).clamp_min(0)
        chain = rows_of_parents(
            self.token_ids, parents.expand_as(self.token_ids), self.num_kept - 1
        )
        for own, new in (
            (rows.token_ids, chain.token_ids),
            (rows.parents, chain.parents),
            (rows.depths, chain.depths),
            (rows.visible, chain.visible),
        ):
            own.index_copy_(0, self.slots, new)
        bases = state.lengths.index_select(0, self.slots).unsqueeze(1) - 1
        self._write(batch.token_ids, chain.token_ids.clamp_min(0))
        self._write(batch.positions, bases + chain.depths)
        if batch.tail_mask is not None:
            batch.tail_mask.view_as(rows.visible).index_copy_(0, self.slots, chain.visible)
        if self.num_kept < num_rows:
            # The next slot may compute the tokens there.
            places = batch.slots.view(-1, num_rows).index_select(0, self.slots)
            self._write(batch.slots, torch.where(steps < self.num_kept, places, 0))

    def accept(self, drawn: Tensor) -> None:
        """Has the rows of chunks draw the token that comes next, but for the last row of each.

        Args:
            drawn: `[S, T]` int64, written.
        """
        following = self.token_ids.roll(-1, dims=1)
        following[:, -1] = NO_TOKEN
        own = drawn.index_select(0, self.slots)
        drawn.index_copy_(0, self.slots, torch.where(following == NO_TOKEN, own, following))

    def _write(self, flat: Tensor, rows: Tensor) -> None:
        flat.view(-1, rows.shape[1]).index_copy_(0, self.slots, rows.to(flat.dtype))
