"""Programmatic dependent launch: a kernel takes its place while the one before it still runs.

What it waits for are activations. Weights are there already, so a product of few rows has them
brought into the L2 cache meanwhile: the memory would be idle for as long as a small kernel takes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def begin(IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until every kernel before this one is done, then lets the next one take its place.

    The first thing that a kernel launched with `dependent_launch` does. In this order a kernel
    that has begun knows all but its direct predecessor to be done.
    """
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def early(places, mask, HAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns weights that a kernel may load before it begins, in float32; nothing if not HAS."""
    return tl.load(places, mask=mask, other=0.0).to(tl.float32) if HAS else 0.0


@triton.jit  # type: ignore[untyped-decorator]
def fetch_rows(  # type: ignore[no-untyped-def]
    rows, NUM_ROWS: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr
):
    """Has the first SIZE bytes of NUM_ROWS rows brought into L2, which changes no result.

    Args:
        rows: address of the first one, a multiple of 16.
        STRIDE: bytes from a row to the next one; a multiple of 16.
        SIZE: a multiple of 16 times the requests a row.
    """
    # As many requests as a program has threads, of which each makes its own.
    num_pieces: tl.constexpr = 128 // NUM_ROWS
    piece: tl.constexpr = SIZE // num_pieces
    lanes = tl.arange(0, 128)
    places = rows.to(tl.int64) + lanes % NUM_ROWS * STRIDE + lanes // NUM_ROWS * piece
    sizes = tl.full((128,), piece, tl.int32)
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,r",
        [places, sizes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
