"""Triton kernels of the coupled draw: noise and argmax in one pass over the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.speculation.noise_jit import gumbel_row
from shared.speculation.row_sampling import RowSampling
from shared.speculation.topk_jit import NO_KEY, best_of, index_of, keys_of, value_of

_BLOCK = 2048


@triton.jit(do_not_specialize=["row_stride"])  # type: ignore[untyped-decorator]
def block_maxima(  # type: ignore[no-untyped-def]
    logits, maxima, row_stride, vocab_size, num_blocks, BLOCK: tl.constexpr
):
    """Writes the highest logit of one block of one row."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        logits + row.to(tl.int64) * row_stride + tokens,
        mask=tokens < vocab_size, other=float("-inf"),
    )  # fmt: skip
    tl.store(maxima + row * num_blocks + block, tl.max(values.to(tl.float32), 0))


@triton.jit(do_not_specialize=["row_stride"])  # type: ignore[untyped-decorator]
def draw_blocks(  # type: ignore[no-untyped-def]
    logits, temperatures, greedy, seeds, positions, maxima, best_values, best_tokens,
    row_stride, vocab_size, num_blocks,
    HAS_DRAWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes the winner of one block of one row: its value, perturbed unless the row is greedy."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < vocab_size
    values = tl.load(
        logits + row.to(tl.int64) * row_stride + tokens, mask=is_token, other=float("-inf")
    ).to(tl.float32)
    if HAS_DRAWS:
        if tl.load(greedy + row) == 0:
            blocks = tl.arange(0, BLOCKS)
            parts = tl.load(
                maxima + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf")
            )
            scaled = tl.div_rn(values - tl.max(parts, 0), tl.load(temperatures + row))
            position = tl.load(positions + row)
            values = scaled + gumbel_row(block * BLOCK, position, tl.load(seeds + row), BLOCK)
            values = tl.where(is_token, values, float("-inf"))
    best = best_of(tl.where(is_token, keys_of(values, tokens), NO_KEY), 0)
    place = row * num_blocks + block + tl.arange(0, 1)
    tl.store(best_values + place, value_of(best))
    tl.store(best_tokens + place, index_of(best).to(tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def pick_tokens(best_values, best_tokens, drawn, num_blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the token of one row from the winners of its blocks; the lowest on ties."""
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    is_block = blocks < num_blocks
    values = tl.load(best_values + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    _, place = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(drawn + row, tl.load(best_tokens + row * num_blocks + place).to(tl.int64))


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
