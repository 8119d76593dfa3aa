"""Device functions of `topk` in Triton.

A *key* orders like `stable_topk`: by value, then by the lowest index. Its high half is the float's
bits, made to order like integers, its low half the index from above.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def keys_of(values, indices):  # type: ignore[no-untyped-def]
    """Returns int64 keys of float32 values; indices are below 2^32."""
    # Adding zero turns -0.0, whose bits order below 0.0, into 0.0.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0xFFFFFFFF - indices.to(tl.int64))


@triton.jit
def value_of(keys):  # type: ignore[no-untyped-def]
    """Returns the float32 values of keys."""
    ordered = (keys >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def index_of(keys):  # type: ignore[no-untyped-def]
    """Returns the int64 indices of keys."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)
