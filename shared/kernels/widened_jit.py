"""Widens 8-bit numbers in registers for a matrix instruction.

Hardware conversions would use slow units three times per element; these functions move and mask
two numbers at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
