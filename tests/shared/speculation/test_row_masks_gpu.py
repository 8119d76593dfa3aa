"""Masks take from logits what rows may not draw, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.speculation.row_sampling import mask_logits
from tests.helpers.kernel_device import kernel_device

VOCAB_SIZE, NUM_ROWS = 5000, 7


def _words(allowed: list[set[int]], num_words: int) -> Tensor:
    bits = np.zeros((len(allowed), 32 * num_words), np.uint8)
    for row, tokens in zip(bits, allowed, strict=True):
        row[list(tokens)] = 1
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def _check(
    device: torch.device,
    vocab_size: int,
    num_words: int,
    dtype: torch.dtype,
    mask: Callable[[Tensor, Tensor, Tensor], None] = mask_logits,
) -> None:
    last = min(32 * num_words, vocab_size) - 1
    allowed = [{0, 31, 32, last}, {1, last // 2}, set(range(last + 1))]
    logits = torch.randn((NUM_ROWS, vocab_size), generator=torch.Generator().manual_seed(1))
    found = logits.to(device, dtype)
    rows = torch.tensor([5, 0, 2], device=device)
    mask(found, rows, _words(allowed, num_words).to(device))
    expected = logits.to(dtype)
    for row, tokens in zip((5, 0, 2), allowed, strict=True):
        banned = [token for token in range(vocab_size) if token not in tokens]
        expected[row, banned] = float("-inf")
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("num_words", [157, 158, 100], ids=["as many", "more", "fewer"])
def test_only_named_rows_lose_what_they_may_not_draw(num_words: int) -> None:
    _check(torch.device("cpu"), VOCAB_SIZE, num_words, torch.float32)


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("vocab_size", [24, 5000, 12_289])
@pytest.mark.parametrize("missing", [0, 3, -1])
def test_kernel_does_what_plain_torch_does(vocab_size: int, missing: int) -> None:
    # Triton is not installed where there is no CUDA.
    from shared.speculation.draw_triton import fused_mask

    num_words = max(-(-vocab_size // 32) - missing, 2)
    _check(kernel_device(), vocab_size, num_words, torch.float32, fused_mask)


@pytest.mark.gpu
def test_kernel_masks_bfloat16() -> None:
    _check(torch.device("cuda"), 128_256, 4008, torch.bfloat16)
