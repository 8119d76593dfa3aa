"""8-bit numbers in registers, widened for a matrix instruction.

Conversions of the hardware would take its slow units three times an element; these are moves and
masks of two numbers at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Sign, exponent and mantissa of e4m3 at the places of a bfloat16 are 2^-120 of the number.
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
_E4M3_WORDS: tl.constexpr = tl.constexpr(
    "{ .reg .b32 pair, sign, factor; mov.b32 factor, 0x7B807B80;"
    + "".join(
        f"prmt.b32 pair, $4, $5, 0x{4 + byte}0{byte}0;" + _E4M3.format(f"${byte}")
        for byte in range(4)
    )
    + "}"
)
# Seven bits behind the exponent of 128 are a bfloat16 of 128 and more; the sign says what is too
# much, 128 or 256.
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
    """Returns the four bytes of int32 words, first byte first, as numbers in the dtype of `like`.

    The bytes are e4m3 or int8.
    """
    if like.dtype == tl.bfloat16:
        four = tl.inline_asm_elementwise(
            _E4M3_WORDS if IS_E4M3 else _INT8_WORDS, "=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        four = (
            number(words, like, IS_E4M3), number(words >> 8, like, IS_E4M3),
            number(words >> 16, like, IS_E4M3), number(words >> 24, like, IS_E4M3),
        )  # fmt: skip
    return four


@triton.jit  # type: ignore[untyped-decorator]
def number(words, like, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the lowest byte of each word as a number in the dtype of `like`."""
    low = words.to(tl.int8)
    return low.to(tl.float8e4nv, bitcast=True).to(like.dtype) if IS_E4M3 else low.to(like.dtype)
