"""The tokens that each row of a step may draw, where the host decides that: grammars and rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.speculation.distributions import masked_logits, num_mask_words
from shared.speculation.verify import AcceptedPath
from shared.tokens import TokenTree

ALL_TOKENS = -1
"""Every bit of a word."""


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Masks of N rows, on the host.

    Attributes:
        rows: of a tree, or of a step.
        words: `[N, W]`, bit i % 32 of word i // 32 says whether the row may draw token i; zeros
            where it must not draw. Tokens behind the last word are forbidden.
    """

    rows: Sequence[int]
    words: NDArray[np.int32]

    def behind(self, first_row: int) -> MaskedRows:
        """Returns the same masks of rows that stand behind others."""
        return MaskedRows([first_row + row for row in self.rows], self.words)


def mask_logits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Writes -inf to `logits` `[R, V]` for the tokens that some rows may not draw.

    Args:
        rows: `[N]` int64.
        words: `[N, W]` int32, see `MaskedRows`; no row of zeros.
    """
    if logits.is_cuda:
        from shared.speculation.mask_triton import fused_mask

        fused_mask(logits, rows, words)
        return
    wide = words.new_zeros((len(words), num_mask_words(logits.shape[1])))
    num_words = min(words.shape[1], wide.shape[1])
    wide[:, :num_words] = words[:, :num_words]
    logits.index_copy_(0, rows, masked_logits(logits.index_select(0, rows), wide))


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of R rows.

    Attributes:
        bits: `[R, W]` int32 on the device, see `masked_logits`.
        may_draw: `[R]` bool on the host; False for the rows of nodes that their grammar forbids,
            and beyond a bound of the matcher. A token drawn there means nothing.
    """

    bits: Tensor
    may_draw: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        masks: Iterable[MaskedRows],
        *,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> RowMasks:
        """Queues the upload of masks; rows without one may draw any token."""
        shape = (num_rows, num_mask_words(vocab_size))
        bits = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        rows, may_draw = bits.numpy(), np.ones(num_rows, np.bool_)
        is_masked = np.zeros(num_rows, np.bool_)
        for each in masks:
            own = list(each.rows)
            is_masked[own] = may_draw[own] = each.words.any(axis=1)
            num_words = min(each.words.shape[1], shape[1])
            rows[own, :num_words] = each.words[:, :num_words]
            rows[own, num_words:] = 0
        rows[~is_masked] = ALL_TOKENS
        return cls(bits.to(device, non_blocking=True), may_draw)

    def cut(self, path: AcceptedPath, tree: TokenTree, first_row: int) -> AcceptedPath:
        """Ends a path at the first node whose row may not draw: the node is the bonus then."""
        for place, node in enumerate(path.node_indices):
            if not self.may_draw[first_row + 1 + node]:
                return AcceptedPath(path.node_indices[:place], tree.token_ids[node])
        return path
