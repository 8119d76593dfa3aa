"""Launches the kernel of `exchange_jit`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.kernels.exchange import PeerAddresses
from shared.kernels.exchange_jit import exchange

# All programs wait for others, so a GPU must hold them at the same time; every one can.
_MAX_PROGRAMS = 128
_SMALLEST_BLOCK = 4096


def launch(part: Tensor, peers: PeerAddresses) -> Tensor:
    """Computes `exchange.exchanged_sum` of contiguous parts."""
    assert part.is_contiguous()
    total = torch.empty_like(part)
    per_program = triton.cdiv(part.numel(), min(_MAX_PROGRAMS, peers.max_programs))
    block = max(_SMALLEST_BLOCK, triton.next_power_of_2(per_program))
    exchange[(triton.cdiv(part.numel(), block),)](
        part, total, peers.buffers, peers.flags, part.numel(),
        RANK=peers.rank, SIZE=len(peers.buffers), BLOCK=block, num_warps=16,
    )  # fmt: skip
    return total
