"""Triton kernel of a sum over GPUs that read each other's memory.

Each program waits for those of the same number on the other ranks, twice: before it reads what they
wrote, and before the next sum writes over what they read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def meet(pads, RANK: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits for this program of every other rank. Flags go from 0 to 1 and back.

    Args:
        pads: `[SIZE]` addresses of the ranks' flags, `[programs, SIZE]` int32 each.
    """
    tl.debug_barrier()
    place = tl.program_id(0) * SIZE
    for other in tl.static_range(SIZE):
        if other != RANK:
            flags = tl.load(pads + other).to(tl.pointer_type(tl.int32))
            while tl.atomic_cas(flags + place + RANK, 0, 1, sem="release", scope="sys") != 0:
                pass
    own = tl.load(pads + RANK).to(tl.pointer_type(tl.int32))
    for other in tl.static_range(SIZE):
        if other != RANK:
            while tl.atomic_cas(own + place + other, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def exchange(  # type: ignore[no-untyped-def]
    part, total, buffers, pads, numel,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds `part` `[numel]` of every rank in the order of ranks, in float32, rounded once.

    Args:
        buffers: `[SIZE]` addresses of the ranks' memory, for their parts.
        pads: see `meet`.
    """
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < numel
    dtype = part.dtype.element_ty
    own = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(dtype)), 16)
    tl.store(own + places, tl.load(part + places, mask=inside), mask=inside)
    meet(pads, RANK, SIZE)
    first = tl.multiple_of(tl.load(buffers).to(tl.pointer_type(dtype)), 16)
    added = tl.load(first + places, mask=inside, volatile=True).to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        theirs = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(dtype)), 16)
        added += tl.load(theirs + places, mask=inside, volatile=True).to(tl.float32)
    tl.store(total + places, added.to(dtype), mask=inside)
    meet(pads, RANK, SIZE)
