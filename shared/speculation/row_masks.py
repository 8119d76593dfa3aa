"""Masks from the host (grammars and rules) of the tokens that each row of a step may draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALL_TOKENS = -1
"""Every bit of a word."""
WORD_BITS = 32


def num_mask_words(vocab_size: int) -> int:
    """Returns the 32-bit words of one row's mask."""
    return -(-vocab_size // WORD_BITS)


@dataclass(frozen=True, slots=True)
class TreeMasks:
    """Masks of the rows of trees, tree behind tree: each root's row, then its nodes'.

    Attributes:
        words: `[N, W]` int32 on the device, bit i % 32 of word i // 32 is set if the row may draw
            token i; all bits in a row that must not draw. Tokens behind the last word are
            forbidden.
        is_open: `[N]` bool on the host, False in a row that must not draw.
    """

    words: Tensor
    is_open: NDArray[np.bool_]


def mask_logits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Writes -inf to `logits` `[R, V]` for the tokens that some rows may not draw.

    Draws then follow the model's distribution, conditioned on allowed tokens, with any temperature,
    top-k, top-p and min-p applied afterwards.

    Args:
        rows: `[N]` int64.
        words: `[N, W]` int32, see `TreeMasks`; no row of zeros.
    """
    if logits.is_cuda:
        from shared.speculation.draw_triton import fused_mask

        fused_mask(logits, rows, words)
        return
    bits = (words.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32)) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]].to(torch.bool)
    is_forbidden = torch.ones(len(words), logits.shape[1], dtype=torch.bool)
    is_forbidden[:, : is_allowed.shape[1]] = ~is_allowed
    masked = logits.index_select(0, rows).masked_fill_(is_forbidden, float("-inf"))
    logits.index_copy_(0, rows, masked)
