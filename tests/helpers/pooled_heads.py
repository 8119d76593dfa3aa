"""Forward passes of draft heads over a KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.heads.dflash import DflashHead
from shared.models.heads.head import DraftHead


@dataclass(frozen=True)
class HeadRunner:
    head: DraftHead
    pool: KvPool

    @torch.inference_mode()
    def fuse(self, rows: Tensor) -> Tensor:
        return self.head.fuse(rows)

    @torch.inference_mode()
    def states(self, batch: ForwardBatch, hidden: Tensor, *, layer: int = 0) -> Tensor:
        """Returns the states `[T, H]` of every row, computed by one layer."""
        return self.head.forward(batch, hidden, self.pool, layer=layer)

    @torch.inference_mode()
    def logits(self, states: Tensor, layer: int = 0) -> Tensor:
        return self.head.logits(states, layer)


@dataclass(frozen=True)
class BlockRunner:
    head: DflashHead
    pool: KvPool

    @torch.inference_mode()
    def write_context(self, rows: Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        self.head.write_context(rows, torch.tensor(positions), torch.tensor(slots), self.pool)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Tensor:
        """Returns the logits of the batch's `logit_rows`."""
        states = self.head.forward(batch, self.pool)
        return self.head.logits(states.index_select(0, batch.logit_rows))
