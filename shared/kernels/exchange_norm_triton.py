"""Triton kernel of a sum over GPUs, the residual sum and the norm after it, row by row.

A program writes its rows into the memory of every other GPU and then waits for theirs in its own,
so that a row crosses the link once, without a request. Memory in which a number is expected holds
all ones, a NaN that is never sent: so each number shows by itself that it has arrived, in any
order, without a flag or a fence.

A row uses two slots in turn, and the reader of a slot fills it with ones again. No rank writes to a
slot before that: it does so for the row's sum n + 2 at the earliest, after it has seen every other
rank's numbers of sum n + 1. A rank sends those in a kernel that starts after its kernel of sum n
has ended, which has read and refilled the slot.

The number of the next slot is on the device, one per row, used by the row's program only. So
replayed graphs, with any number of sums and rows, continue where the last kernel stopped, alike on
every rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.dependent_jit import begin
from shared.kernels.exchange import PeerSlots
from shared.kernels.fused_jit import normed_row, summed
from shared.kernels.fused_triton import norm_warps, parts_of
from shared.kernels.launch import dependent_launch
from shared.kernels.pointwise import Partials

_BITS = {2: torch.int16, 4: torch.int32}


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def exchange_norm(  # type: ignore[no-untyped-def]
    part, hidden, weight, sums, normed, mailbox, slots, turns, num_rows, num_columns,
    hidden_stride, part_size, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, MAX_ROWS: tl.constexpr, SLOT: tl.constexpr,
    LARGEST: tl.constexpr, HAS_HIDDEN: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes `hidden` plus the sum of every rank's `part`, and its norm.

    Every program sends all of its rows before it waits. So programs cannot wait for each other in a
    cycle, as long as all of them run on the device at the same time.

    Args:
        part: `[num_rows, num_columns]`, or its parts, see `summed`.
        mailbox: this rank's slots, as integers of the numbers' width.
        slots: `[SIZE]` addresses of the ranks' slots `[2, SIZE, MAX_ROWS, SLOT]`, as such integers,
            by turn, sender and row.
        turns: `[MAX_ROWS]` int32, the slot of the row's next sum.
        LARGEST: the largest of these integers, also a NaN.
    """
    begin(IS_DEPENDENT)
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    bits = mailbox.dtype.element_ty
    dtype = normed.dtype.element_ty
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places = row * num_columns + columns
        own = summed(part, places, is_column, part_size, dtype, NUM_PARTS).to(bits, bitcast=True)
        # All ones is sent as another NaN, since the receiver would wait for ever.
        sent = tl.where(own == -1, LARGEST, own).to(bits)
        place = ((tl.load(turns + row) * SIZE + RANK) * MAX_ROWS + row) * SLOT
        for other in tl.static_range(SIZE):
            if other != RANK:
                slot = tl.multiple_of(tl.load(slots + other).to(tl.pointer_type(bits)), 16)
                tl.store(slot + place + columns, sent, mask=is_column, cache_modifier=".wt")
    # Loaded while the rows are being sent.
    weights = tl.load(weight + columns, mask=is_column, other=0.0)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        turn = tl.load(turns + row)
        places = row * num_columns + columns
        own = summed(part, places, is_column, part_size, dtype, NUM_PARTS).to(bits, bitcast=True)
        more = hidden + row * hidden_stride + columns
        residual = tl.load(more, mask=is_column & HAS_HIDDEN, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                addend = own
            else:
                slot = mailbox + ((turn * SIZE + rank) * MAX_ROWS + row) * SLOT + columns
                addend = tl.load(slot, mask=is_column, other=0, volatile=True)
                # The maximum is over all threads: after the loop all threads have read the slot.
                while tl.max((addend == -1).to(tl.int32), 0) == 1:
                    addend = tl.load(slot, mask=is_column, other=0, volatile=True)
                tl.store(slot, tl.full([BLOCK], -1, bits), mask=is_column)
            wide = addend.to(dtype, bitcast=True).to(tl.float32)
            if rank == 0:
                total = wide
            else:
                total += wide
        # Every thread has read the turn.
        tl.store(turns + row, 1 - turn)
        # Rounded after each sum, as two kernels would.
        values = total.to(dtype)
        if HAS_HIDDEN:
            values = (residual.to(tl.float32) + values.to(tl.float32)).to(dtype)
        tl.store(sums + places, values, mask=is_column)
        result = normed_row(values, weights, num_columns, eps)
        tl.store(normed + places, result, mask=is_column)


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
    # Programs wait for those of other GPUs, so all must run on their GPU at the same time.
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
