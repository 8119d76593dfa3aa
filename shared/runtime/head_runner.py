"""Runs forwards of one draft head, or of one block head, over one KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_numbers
from shared.models.heads.dflash import DflashHead
from shared.models.heads.head import DraftHead


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Result of one forward, for its L logit rows, in the order of `batch.logit_rows`.

    Attributes:
        logits: `[L, V]` float32 over the target's vocabulary; -inf where the head has no token.
        states: `[L, H]`, the hidden states that the rows below them in a tree read.
    """

    logits: Tensor
    states: Tensor


class HeadRunner:
    """`ModelRunner`'s counterpart for heads, whose rows also read a hidden state."""

    def __init__(self, head: DraftHead, pool: KvPool) -> None:
        assert pool.layout == head.kv_layout(pool.page_size, pool.layout.dtype), (
            f"the pool's layout {pool.layout} does not fit the head"
        )
        self.head = head
        self.pool = pool

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    @torch.inference_mode()
    def fuse(self, rows: Tensor) -> Tensor:
        """Returns hidden states `[R, H]` of feature rows `[R, W]` of any float dtype, anywhere."""
        return self.head.fuse(rows)

    @torch.inference_mode()
    def states(self, batch: ForwardBatch, hidden: Tensor, *, layer: int) -> Tensor:
        """Returns the states `[T, H]` of every row of `batch`, computed by one layer."""
        return self.head.forward(batch, hidden, self.pool, layer=layer)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Returns `[L, V]` float32 for `states` `[L, H]`."""
        return self.head.logits(states)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, hidden: Tensor) -> HeadOutput:
        """Computes `batch` from `hidden` `[T, H]`, one hidden state a row."""
        states = self.head.forward(batch, hidden, self.pool).index_select(0, batch.logit_rows)
        return HeadOutput(self.head.logits(states), states)


class BlockRunner:
    """`HeadRunner`'s counterpart for heads that draft blocks."""

    def __init__(self, head: DflashHead, pool: KvPool) -> None:
        assert pool.layout == head.kv_layout(pool.page_size, pool.layout.dtype), (
            f"the pool's layout {pool.layout} does not fit the head"
        )
        self.head = head
        self.pool = pool

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
        states = self.head.forward(batch, self.pool)
        return self.head.logits(states.index_select(0, batch.logit_rows))
