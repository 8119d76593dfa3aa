"""Triton kernel that widens int8 weights in memory, for products of the library."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.linear import WORD_BLOCK, scale_rows
from shared.kernels.widened_jit import block_factors, unpacked

# Blocks of 128 elements that a program widens: 8 KiB of reads.
_PROGRAM_BLOCKS = 64


@triton.jit  # type: ignore[untyped-decorator]
def widen(  # type: ignore[no-untyped-def]
    words, scales, wide, num_blocks,
    DEPTH: tl.constexpr, SCALE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes `wide` `[N, K]`, block after block of 128 columns.

    Args:
        words: `[N, K / 4]` int32, in the order of `quantised.in_words`.
        SCALE_ROWS: see `linear.scale_rows`.
    """
    own = tl.program_id(0) * PROGRAM_BLOCKS + tl.arange(0, PROGRAM_BLOCKS)
    # Blocks past the end write the last block again.
    block = tl.minimum(own, num_blocks - 1)
    row_blocks: tl.constexpr = DEPTH // BLOCK
    channels, starts = block // row_blocks, block % row_blocks * BLOCK
    if SCALE_ROWS == 0:
        factors = tl.load(scales + channels)
    else:
        factors = block_factors(scales, 0, channels, starts, SCALE_ROWS, 0, DEPTH)
    first = block.to(tl.int64)[:, None]
    quarter: tl.constexpr = BLOCK // 4
    own_words = tl.load(words + first * quarter + tl.arange(0, quarter)[None, :])
    dtype = wide.dtype.element_ty
    numbers = unpacked(own_words, tl.zeros([1], dtype), False).to(tl.float32)
    places = first * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(wide + places, (numbers * factors[:, None]).to(dtype))


def launch_widening(values: Tensor, scales: Tensor, wide: Tensor) -> None:
    """Computes `QuantisedWeight.widen_into` for packed values."""
    num_channels, depth = values.shape
    assert values.is_contiguous()
    assert scales.is_contiguous()
    assert wide.is_contiguous()
    assert depth % WORD_BLOCK == 0
    num_blocks = values.numel() // WORD_BLOCK
    widen[(triton.cdiv(num_blocks, _PROGRAM_BLOCKS),)](
        values.view(torch.int32), scales, wide, num_blocks,
        DEPTH=depth, SCALE_ROWS=scale_rows(scales, num_channels),
        BLOCK=WORD_BLOCK, PROGRAM_BLOCKS=_PROGRAM_BLOCKS,
    )  # fmt: skip
