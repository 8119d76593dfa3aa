"""Runs the two passes of one DFlash head over one KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_numbers
from shared.models.heads.dflash import DflashHead
from shared.runtime.compiled import compile_small


class BlockRunner:
    """`HeadRunner`'s counterpart for heads that draft blocks.

    Args:
        max_compiled_sequences: see `compile_small`.
    """

    def __init__(
        self, head: DflashHead, pool: KvPool, *, max_compiled_sequences: int | None = None
    ) -> None:
        assert pool.layout == head.kv_layout(pool.page_size, pool.layout.dtype), (
            f"the pool's layout {pool.layout} does not fit the head"
        )
        self.head = head
        self.pool = pool
        self._forward = compile_small(head.forward, max_compiled_sequences)

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    @torch.inference_mode()
    def write_context(self, rows: Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Takes in the features `[R, W]` of R positions, each for the slot beside it."""
        index = uploaded_numbers([positions, slots], self.device)
        self.head.write_context(rows, index[0], index[1], self.pool)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Tensor:
        """Returns the logits `[L, V]` float32 of the rows of blocks that ask for them."""
        states = self._forward(batch, self.pool)
        return self.head.logits(states.index_select(0, batch.logit_rows))
