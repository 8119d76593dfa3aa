"""Launches the kernel of `exchange_norm_jit`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.kernels.dependent import dependent_launch
from shared.kernels.exchange import PeerSlots
from shared.kernels.exchange_norm_jit import exchange_norm
from shared.kernels.fused_triton import norm_warps

_BITS = {2: torch.int16, 4: torch.int32}


def launch(
    part: Tensor, hidden: Tensor | None, weight: Tensor, eps: float, slots: PeerSlots
) -> tuple[Tensor, Tensor]:
    """Computes `exchange.exchanged_norm` of contiguous parts."""
    assert part.is_contiguous()
    assert slots.fits(part)
    num_rows, num_columns = part.shape
    assert hidden is None or hidden.stride(1) == 1
    sums, normed = torch.empty_like(part), torch.empty_like(part)
    bits = _BITS[part.itemsize]
    block = triton.next_power_of_2(num_columns)
    # Programs wait for those of other GPUs, so a GPU must hold all of them at the same time.
    exchange_norm[(min(num_rows, slots.max_programs),)](
        part.view(bits), part if hidden is None else hidden, weight, sums, normed,
        slots.places, slots.turns, num_rows, num_columns,
        0 if hidden is None else hidden.stride(0), eps,
        RANK=slots.rank, SIZE=len(slots.places), MAX_ROWS=len(slots.turns),
        SLOT=slots.slot_bytes // part.itemsize, LARGEST=torch.iinfo(bits).max,
        HAS_HIDDEN=hidden is not None, BLOCK=block, num_warps=norm_warps(block),
        **dependent_launch(part.device, num_rows),
    )  # fmt: skip
    return sums, normed
