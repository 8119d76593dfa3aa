"""A sum over GPUs in one Triton kernel, to compare with torch's copy and sum in two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from shared.layers.peer_memory import PeerMemory

# Programs of a launch, which all wait for each other: fewer than a GPU holds and than has flags.
_MAX_PROGRAMS = 128
_SMALLEST_BLOCK = 4096


@triton.jit
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


@triton.jit
def exchange(
    part, total, buffers, pads, numel,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Adds `part` of every rank in the order of ranks, in float32, rounded once."""
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


class FusedSum:
    """`TensorGroup.sum` over the memory of `peers`, for parts that fit."""

    def __init__(self, peers: PeerMemory, rank: int) -> None:
        handle = symmetric_memory.rendezvous(peers.buffer, peers.group_name)
        device = peers.buffer.device
        buffers = [
            handle.get_buffer(other, peers.buffer.shape, torch.uint8).data_ptr()
            for other in range(peers.size)
        ]
        self.rank = rank
        self.peers = peers
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._buffers = torch.tensor(buffers, dtype=torch.int64, device=device)
        self._pads = torch.tensor(handle.signal_pad_ptrs, dtype=torch.int64, device=device)

    def sum(self, part: Tensor) -> Tensor:
        total = torch.empty_like(part)
        per_program = triton.cdiv(part.numel(), _MAX_PROGRAMS)
        block = max(_SMALLEST_BLOCK, triton.next_power_of_2(per_program))
        exchange[(triton.cdiv(part.numel(), block),)](
            part, total, self._buffers, self._pads, part.numel(),
            RANK=self.rank, SIZE=self.peers.size, BLOCK=block, num_warps=16,
        )  # fmt: skip
        return total
