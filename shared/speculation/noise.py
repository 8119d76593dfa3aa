"""Gumbel noise as a pure function of (seed, absolute position, token id, stream).

Nothing is drawn from a generator. So any process, on any device, in any order, computes the same
noise for the same token of the same position: the draft, the target, a restarted target.

Two choices keep the values the same on CPU and GPU. The random words come from Philox by integer
arithmetic in int64, which wraps modulo 2^64 everywhere. The two logarithms run in float64 and are
rounded to float32 once. Libraries differ in the last bits of a logarithm. With 29 spare bits the
rounded results differ with a probability of about 1e-9 for each value, where float32 logarithms
differ every few values. Float32 could not hold the words either: the highest would round to u = 1,
whose noise is infinite.

On a GPU all operations have fixed shapes and none waits for it, so CUDA graphs can capture them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", Tensor, "np.ndarray[Any, np.dtype[np.int64]]")
Words: TypeAlias = tuple[Array, Array, Array, Array]
Key: TypeAlias = tuple[Array, Array]

_NUM_ROUNDS = 10
_WORDS_PER_BLOCK = 4
_WORD_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_COIN_SIDES = 2**52


def philox_4x32_10(counter: Words[Array], key: Key[Array]) -> Words[Array]:
    """Returns the four random words of a counter.

    All arrays are int64 holding words in [0, 2^32), of shapes that broadcast. On a CPU NumPy's
    take half the time of torch's. Words that are
    shared by a row or a column stay small for the first rounds, which then cost next to nothing.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
    section 3.3 and table 2.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = c0 * _MULTIPLIERS[0]
        product_1 = c2 * _MULTIPLIERS[1]
        # c1 and c3 keep the whole product: their high halves meet only xor and a mask, so the low
        # half needs a mask of its own only after the last round.
        c0, c1 = ((product_1 >> 32) ^ c1 ^ k0) & _WORD_MASK, product_1
        c2, c3 = ((product_0 >> 32) ^ c3 ^ k1) & _WORD_MASK, product_0
        k0 = (k0 + _KEY_STEPS[0]) & _WORD_MASK
        k1 = (k1 + _KEY_STEPS[1]) & _WORD_MASK
    return c0, c1 & _WORD_MASK, c2, c3 & _WORD_MASK


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int, *, stream: int = 0) -> Tensor:
    """Returns standard Gumbel noise for every token id of each row.

    Args:
        seeds: `[R]` int64; all 64 bits key the generator.
        positions: `[R]` int64, absolute position of the token to be drawn, not of the row that
            predicts it.
        vocab_size: V. A token's noise does not depend on it.
        stream: in [0, 2^32); separates uses of one seed that must be independent.

    Returns:
        `[R, V]` float32, finite, in about [-3.2, 22.9].
    """
    blocks = torch.arange(-(-vocab_size // _WORDS_PER_BLOCK), device=seeds.device).unsqueeze(0)
    words: Sequence[Tensor]
    if not seeds.is_cpu:
        words = _words(seeds.unsqueeze(1), positions.unsqueeze(1), blocks, stream)
        return _gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])
    # Nodes of one tree level share their noise, so each pair of seed and position is computed once.
    pairs = torch.stack((seeds, positions))
    pairs, rows = pairs.unique(dim=1, return_inverse=True)  # type: ignore[no-untyped-call]
    columns = pairs.unsqueeze(2).numpy()
    host_words = _words(columns[0], columns[1], blocks.numpy(), stream)
    words = [torch.from_numpy(word) for word in host_words]
    return _gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]).index_select(0, rows)


def fresh_generator() -> torch.Generator:
    """Returns a host generator with an unpredictable seed."""
    generator = torch.Generator()
    generator.seed()
    return generator


def fresh_seeds(num_seeds: int, generator: torch.Generator) -> Tensor:
    """Returns `[num_seeds]` int64 seeds for noise to be used once; `generator` is on the host."""
    low, high = -(2**63), 2**63 - 1
    return torch.randint(low, high, (num_seeds,), generator=generator, dtype=torch.int64)


def fresh_coins(num_coins: int, generator: torch.Generator) -> tuple[float, ...]:
    """Returns uniform float64 numbers strictly inside (0, 1): odd multiples of 2^-53."""
    sides = torch.randint(_COIN_SIDES, (num_coins,), generator=generator, dtype=torch.int64)
    return tuple(((sides.to(torch.float64) + 0.5) / _COIN_SIDES).tolist())


def _words(seeds: Array, positions: Array, blocks: Array, stream: int) -> Words[Array]:
    """Four words for each row `[R, 1]` and block `[1, B]`; token id `4 * block + w` owns word w."""
    (low, high), key = [
        (values & _WORD_MASK, (values >> 32) & _WORD_MASK) for values in (positions, seeds)
    ]
    return philox_4x32_10((blocks, positions * 0 + stream, low, high), key)


def _gumbel(words: Tensor) -> Tensor:
    """-log(-log u) with u = (word + 1/2) / 2^32, exact in float64 and strictly inside (0, 1)."""
    uniform = words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
