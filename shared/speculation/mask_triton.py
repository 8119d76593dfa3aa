"""Triton kernel that takes the tokens that rows may not draw from their logits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit(do_not_specialize=["row_stride", "num_words"])  # type: ignore[untyped-decorator]
def mask_blocks(logits, rows, words, row_stride, vocab_size, num_words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes -inf where a token's bit is not set, in one block of one of `rows`.

    Args:
        words: `[N, num_words]` int32; what is behind them is not set.
    """
    place = tl.program_id(0)
    row = tl.load(rows + place)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tokens // 32
    word = tl.load(words + place * num_words + index, mask=index < num_words, other=0)
    is_allowed = ((word >> (tokens % 32)) & 1) == 1
    tl.store(
        logits + row * row_stride + tokens, float("-inf"),
        mask=(tokens < vocab_size) & (is_allowed == 0),
    )  # fmt: skip


def fused_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See `row_masks.mask_logits`."""
    assert logits.stride(1) == 1
    assert words.is_contiguous()
    vocab_size = logits.shape[1]
    mask_blocks[(len(rows), triton.cdiv(vocab_size, _BLOCK))](
        logits, rows, words, logits.stride(0), vocab_size, words.shape[1],
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
