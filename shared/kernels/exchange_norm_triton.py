"""Launches the kernel of `exchange_norm_jit`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.kernels.dependent import dependent_launch
from shared.kernels.exchange import PeerSlots
from shared.kernels.exchange_norm_jit import exchange_norm
from shared.kernels.fused_triton import norm_warps, parts_of
from shared.kernels.partials import Partials

_BITS = {2: torch.int16, 4: torch.int32}


def launch(
    part: Tensor | Partials, hidden: Tensor | None, weight: Tensor, eps: float, slots: PeerSlots
) -> tuple[Tensor, Tensor]:
    """Computes `exchange.exchanged_norm`."""
    assert slots.fits(part)
    num_rows, num_columns = part.shape
    assert hidden is None or hidden.stride(1) == 1
    source, num_parts = parts_of(part)
    sums, normed = torch.empty((2, num_rows, num_columns), dtype=part.dtype, device=source.device)
    bits = _BITS[part.dtype.itemsize]
    block = triton.next_power_of_2(num_columns)
    # Programs wait for those of other GPUs, so a GPU must hold all of them at the same time.
    exchange_norm[(min(num_rows, slots.max_programs),)](
        source, source if hidden is None else hidden, weight, sums, normed,
        slots.memory.view(bits), slots.places, slots.turns, num_rows, num_columns,
        0 if hidden is None else hidden.stride(0), num_rows * num_columns, eps,
        RANK=slots.rank, SIZE=len(slots.places), MAX_ROWS=len(slots.turns),
        SLOT=slots.slot_bytes // part.dtype.itemsize, LARGEST=torch.iinfo(bits).max,
        HAS_HIDDEN=hidden is not None, NUM_PARTS=num_parts, BLOCK=block,
        num_warps=norm_warps(block), **dependent_launch(source.device, num_rows),
    )  # fmt: skip
    return sums, normed
