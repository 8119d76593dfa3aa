"""Launches the coupled draw on CUDA; the kernels are in `draw_jit`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.speculation.draw_jit import block_maxima, draw_blocks, pick_tokens
from shared.speculation.row_sampling import RowSampling

_BLOCK = 2048


def fused_draw(logits: Tensor, sampling: RowSampling | None, positions: Tensor) -> Tensor:
    """Returns what `draw_tokens` returns for rows that temperature alone shapes, `[R]` int64.

    Args:
        logits: `[R, V]` of any float type.
        sampling: None when every row is greedy.
        positions: `[R]` int64.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    blocks, device = triton.next_power_of_2(num_blocks), logits.device
    values = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    tokens = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    drawn = torch.empty(num_rows, dtype=torch.int64, device=device)
    maxima, grid = values, (num_rows, num_blocks)
    columns: tuple[Tensor, ...] = (values,) * 3
    if sampling is not None:
        maxima = torch.empty_like(values)
        block_maxima[grid](
            logits, maxima, logits.stride(0), vocab_size, num_blocks, BLOCK=_BLOCK, num_warps=4
        )
        columns = (sampling.temperatures, sampling.greedy, sampling.seeds)
        columns = tuple(column.contiguous() for column in columns)
    draw_blocks[grid](
        logits, *columns, positions.contiguous(), maxima, values, tokens,
        logits.stride(0), vocab_size, num_blocks,
        HAS_DRAWS=sampling is not None, BLOCK=_BLOCK, BLOCKS=blocks, num_warps=8,
    )  # fmt: skip
    pick_tokens[(num_rows,)](values, tokens, drawn, num_blocks, BLOCKS=blocks, num_warps=1)
    return drawn
