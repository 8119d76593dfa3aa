"""Device functions of the noise: `noise` in Triton, bit for bit.

Words are uint32, whose products wrap as the paper's do; logarithms are float64 for the reason
given in `noise`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_words(blocks, position, seed):  # type: ignore[no-untyped-def]
    """Returns the four words of each block `[N]` of one position and seed, of stream 0."""
    c0 = blocks.to(tl.uint32)
    c1 = tl.zeros_like(c0)
    c2 = (position & 0xFFFFFFFF).to(tl.uint32) + c1
    c3 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + c1
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32) + c1
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32) + c1
    first = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    second = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(c0, first)
        high_1 = tl.umulhi(c2, second)
        low_0 = c0 * first
        low_1 = c2 * second
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = k0 + tl.full(k0.shape, 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full(k1.shape, 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def gumbel_of(words):  # type: ignore[no-untyped-def]
    """Returns the float32 noise of words."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def gumbel_row(first_token, position, seed, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the noise of BLOCK consecutive tokens; BLOCK and `first_token` are multiples of 4."""
    blocks = first_token // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = philox_words(blocks, position, seed)
    # Joined twice, the last two axes count 0, 2, 1, 3 unless the middle words change places.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return gumbel_of(tl.reshape(words, [BLOCK]))


@triton.jit
def gumbel_at(tokens, position, seed):  # type: ignore[no-untyped-def]
    """Returns the noise of the given tokens `[N]`."""
    w0, w1, w2, w3 = philox_words(tokens // 4, position, seed)
    place = tokens % 4
    low = tl.where(place == 0, w0, w1)
    high = tl.where(place == 2, w2, w3)
    return gumbel_of(tl.where(place < 2, low, high))
