"""Asks for memory that a later kernel reads, in Triton: a hint, which changes no result."""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.ahead import PIECE_BYTES

PROGRAM_PIECES = 256
_PIECE = tl.constexpr(PIECE_BYTES)
_PIECES = tl.constexpr(PROGRAM_PIECES)


@triton.jit
def ask_ahead(memory, program, num_pieces, stride_bytes):  # type: ignore[no-untyped-def]
    """Has some of the pieces of `memory`, `stride_bytes` apart, fetched into the L2 cache.

    One piece a thread, for programs of 8 warps. Hopper and later have it.
    """
    pieces = program * _PIECES + tl.arange(0, _PIECES)
    # The last piece may be asked for several times.
    pieces = tl.minimum(pieces, num_pieces - 1).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [memory.to(tl.int64) + pieces * stride_bytes, _PIECE],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
