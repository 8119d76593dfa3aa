"""Programmatic dependent launch: a kernel is placed on the device while its predecessor still runs.

The kernel waits for activations only. Its weights are in memory already, so a product of few rows
prefetches them into the L2 cache meanwhile; the memory would be idle while a small kernel runs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def begin(IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until all earlier kernels have ended, then allows the next kernel to be placed.

    Every kernel launched with `dependent_launch` calls it first. In this order, when a kernel
    starts, all earlier kernels except its direct predecessor have ended.
    """
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def early(places, mask, HAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns weights, which a kernel may load before `begin`, in float32; 0 if not HAS."""
    return tl.load(places, mask=mask, other=0.0).to(tl.float32) if HAS else 0.0


@triton.jit  # type: ignore[untyped-decorator]
def fetch_rows(  # type: ignore[no-untyped-def]
    rows, NUM_ROWS: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr
):
    """Prefetches the first SIZE bytes of NUM_ROWS rows into L2; changes no result.

    Args:
        rows: address of the first row, a multiple of 16.
        STRIDE: bytes from one row to the next, a multiple of 16.
        SIZE: a multiple of 16 times the number of requests per row.
    """
    # One request from each thread of the program.
    num_pieces: tl.constexpr = 128 // NUM_ROWS
    piece: tl.constexpr = SIZE // num_pieces
    lanes = tl.arange(0, 128)
    places = rows.to(tl.int64) + lanes % NUM_ROWS * STRIDE + lanes // NUM_ROWS * piece
    sizes = tl.full((128,), piece, tl.int32)
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,r",
        [places, sizes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
