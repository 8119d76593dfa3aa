"""Memory for the trees that a kernel lays out for the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.empties import empties
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_state import RoundState
from shared.speculation.tree_rows import TreeRows


@dataclass(frozen=True, slots=True)
class UnwrittenTrees:
    """Output tensors for S trees of T rows; see `TreeRows` and `ForwardBatch`.

    Attributes:
        batch_tokens, positions, slots: `[S, T]` int64.
        kv_lengths, prefix_lengths: `[S]` int32.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor
    batch_tokens: Tensor
    positions: Tensor
    slots: Tensor
    kv_lengths: Tensor
    prefix_lengths: Tensor

    @classmethod
    def of(cls, num_slots: int, num_rows: int, device: torch.device) -> UnwrittenTrees:
        wide = empties(6, (num_slots, num_rows), torch.int64, device)
        token_ids, parents, depths, batch_tokens, positions, slots = wide
        visible = torch.empty((num_slots, num_rows, num_rows), dtype=torch.bool, device=device)
        lengths, prefixes = empties(2, (num_slots,), torch.int32, device)
        return cls(
            *(token_ids, parents, depths, visible),
            *(batch_tokens, positions, slots, lengths, prefixes),
        )

    def written(self, state: RoundState, batches: RoundBatches) -> RoundTree:
        """Returns the trees, which a kernel has written by now."""
        batch = batches.fixed(
            token_ids=self.batch_tokens,
            positions=self.positions,
            slots=self.slots,
            kv_lengths=self.kv_lengths,
            prefix_lengths=self.prefix_lengths,
            page_table=state.page_table,
            tail_mask=None if batches.shape.is_chain else self.visible.flatten(0, 1),
        )
        return RoundTree(TreeRows(self.token_ids, self.parents, self.depths, self.visible), batch)
