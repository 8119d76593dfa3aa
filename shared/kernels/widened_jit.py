"""Widens 8-bit numbers in registers for a matrix instruction.

Hardware conversions would use slow units three times per element; these functions move and mask
two numbers at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.linear import WORD_BLOCK

_SCALE_BLOCK: tl.constexpr = tl.constexpr(WORD_BLOCK)
# Sign, exponent and mantissa of e4m3, in the bits of a bfloat16, are 2^-120 of the number.
_E4M3 = """
and.b32 sign, pair, 0x80008000;
shr.u32 pair, pair, 4;
and.b32 pair, pair, 0x07F007F0;
or.b32 pair, pair, sign;
mul.bf16x2 {}, pair, factor;
"""
_E4M3_BYTES: tl.constexpr = tl.constexpr(
    """
    {
    .reg .b32 pair, sign, factor;
    mov.b32 factor, 0x7B807B80;
    prmt.b32 pair, $2, 0, 0x1404;
    """
    + _E4M3.format("$0")
    + "prmt.b32 pair, $2, 0, 0x3424;"
    + _E4M3.format("$1")
    + "}"
)
# Masks the bits of two numbers of a word at once, then those of the other two; see
# `quantised.in_words`. Conversions and shuffles of single bytes would take twice as long.
_E4M3_WORD: tl.constexpr = tl.constexpr(
    """
    {
    .reg .b32 pair, left, factor;
    mov.b32 factor, 0x7B807B80;
    and.b32 pair, $4, 0x87F087F0;
    mul.bf16x2 pair, pair, factor;
    mov.b32 {$0, $1}, pair;
    shl.b32 left, $4, 4;
    and.b32 left, left, 0x80F080F0;
    shr.u32 pair, $4, 4;
    and.b32 pair, pair, 0x07000700;
    or.b32 pair, pair, left;
    mul.bf16x2 pair, pair, factor;
    mov.b32 {$2, $3}, pair;
    }
    """
)
# The low seven bits after the exponent of 128 are a bfloat16 of 128 plus their value. The sign bit
# says how much to subtract, 128 or 256.
_INT8_WORDS: tl.constexpr = tl.constexpr(
    "{ .reg .b32 pair, sign;"
    + "".join(
        f"""
        prmt.b32 pair, $4, $5, 0x0{4 + byte}0{byte};
        lop3.b32 sign, pair, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 pair, pair, 0x007F007F, 0x43004300, 0xEA;
        sub.bf16x2 ${byte}, pair, sign;
        """
        for byte in range(4)
    )
    + "}"
)


@triton.jit
def widened(raw, like):  # type: ignore[no-untyped-def]
    """Returns e4m3 numbers loaded as int8, exactly, in the dtype of `like`."""
    if like.dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            _E4M3_BYTES, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        wide = raw.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    return wide


@triton.jit  # type: ignore[untyped-decorator]
def unpacked(words, like, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the numbers `[N, 128]`, e4m3 or int8, that words `[N, 32]` in the order of
    `quantised.in_words` hold, in the dtype of `like`."""
    if IS_E4M3:
        if like.dtype == tl.bfloat16:
            first, second, third, fourth = tl.inline_asm_elementwise(
                _E4M3_WORD, "=h,=h,=h,=h,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            first, third = e4m3_pair(words, like)
            second, fourth = e4m3_pair(words >> 16, like)
        # Dimensions: bits of the word's index, then the pair, then the number within the pair.
        four = tl.join(tl.join(first, third), tl.join(second, fourth))
        four = tl.reshape(four, (words.shape[0], 2, 2, 2, 4, 2, 2))
        wide = tl.permute(four, (0, 5, 2, 4, 1, 3, 6))
    elif like.dtype == tl.bfloat16:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _INT8_WORDS, "=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        wide = by_bytes(first, second, third, fourth)
    else:
        wide = by_bytes(
            words.to(tl.int8).to(like.dtype), (words >> 8).to(tl.int8).to(like.dtype),
            (words >> 16).to(tl.int8).to(like.dtype), (words >> 24).to(tl.int8).to(like.dtype),
        )  # fmt: skip
    return tl.reshape(wide, (words.shape[0], 4 * words.shape[1]))


@triton.jit  # type: ignore[untyped-decorator]
def block_factors(  # type: ignore[no-untyped-def]
    scales, matrix, channels, start,
    ROWS: tl.constexpr, NUM_CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Returns the scales `[N]` of channels for columns from `start` on, all in one block; 0 if
    ROWS, see `linear.scale_rows`, is 0.

    Args:
        scales: scales of consecutive matrices.
        matrix: index of the matrix.
    """
    if ROWS > 0:
        row = matrix * tl.cdiv(NUM_CHANNELS, ROWS) + channels // ROWS
        factors = tl.load(scales + row * tl.cdiv(DEPTH, _SCALE_BLOCK) + start // _SCALE_BLOCK)
    else:
        factors = 0.0
    return factors


@triton.jit  # type: ignore[untyped-decorator]
def with_block(total, block, factors, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds the sums of a block, times `factors`, to `total`. Without factors (ROWS is 0), `block`
    is the new total already."""
    return tl.fma(block, factors[:, None], total) if ROWS > 0 else block


@triton.jit
def by_bytes(first, second, third, fourth):  # type: ignore[no-untyped-def]
    """Joins the four bytes `[N, 32]` of words to `[N, 2, 2, 32]`; the middle dimensions are the
    index of the byte."""
    return tl.permute(tl.join(tl.join(first, third), tl.join(second, fourth)), (0, 2, 3, 1))


@triton.jit
def e4m3_pair(halves, like):  # type: ignore[no-untyped-def]
    """Returns the two e4m3 numbers in the lower half of each word, in the dtype of `like`."""
    first = (halves >> 8 & 0x80) | (halves >> 4 & 0x7F)
    second = (halves >> 4 & 0x80) | (halves >> 8 & 0x70) | (halves & 0x0F)
    return (
        first.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(like.dtype),
        second.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(like.dtype),
    )
