"""Bit masks of the tokens a row may draw, applied to its logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

WORD_BITS = 32


def num_mask_words(vocab_size: int) -> int:
    """Returns the 32-bit words of one row's mask."""
    return -(-vocab_size // WORD_BITS)


def masked_logits(logits: Tensor, masks: Tensor) -> Tensor:
    """Returns the logits with -inf for every token its row may not draw.

    A distribution made of them is the model's distribution under the condition that the token is
    allowed, whatever temperature and cuts follow.

    Args:
        logits: `[R, V]` of any float type; not changed.
        masks: `[R, ceil(V / 32)]` int32 on the same device; bit i % 32 of word i // 32 allows
            token i. Each row allows at least one token.
    """
    places = torch.arange(WORD_BITS, dtype=torch.int32, device=masks.device)
    is_allowed = (masks.unsqueeze(-1) >> places) & 1
    is_allowed = is_allowed.flatten(1)[:, : logits.shape[1]].to(torch.bool)
    return torch.where(is_allowed, logits, -math.inf)
