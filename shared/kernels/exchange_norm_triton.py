"""Triton kernel of a sum over GPUs, the residual sum and the norm after it, row by row.

A program writes its rows into the memory of every other GPU and then waits for theirs in its own,
so that a row crosses the link once and nothing is asked for. Memory that waits for a number holds
all ones, a NaN that no number is sent as: numbers announce themselves, each on its own, in whatever
order they arrive, and neither a flag nor a fence is needed.

A row has two slots and takes them by turns; the reader of a slot fills it with ones again. No rank
writes to a slot before that. It does so for the row's sum n + 2 at the earliest, after it has seen
every other rank's numbers of sum n + 1, and a rank sends those in a kernel that starts when the one
of its sum n has ended, which read and refilled the slot.

Whose turn it is lies on the device, a number a row, which the program of the row alone reads and
writes: replayed graphs of any number of sums and rows go on where the last kernel stopped, alike on
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

    Every program sends all of its rows before it waits, so that programs wait for no turn of
    another as long as the device holds all of them.

    Args:
        part: `[num_rows, num_columns]`, or what adds up to it, see `summed`.
        mailbox: this rank's slots, of integers as wide as the numbers.
        slots: `[SIZE]` addresses of the ranks' `[2, SIZE, MAX_ROWS, SLOT]` slots, of such integers:
            by turn, sender and row.
        turns: `[MAX_ROWS]` int32, the slot of the row's next sum.
        LARGEST: the largest of the integers, a NaN too.
    """
    begin(IS_DEPENDENT)
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    bits = mailbox.dtype.element_ty
    dtype = normed.dtype.element_ty
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places = row * num_columns + columns
        own = summed(part, places, is_column, part_size, dtype, NUM_PARTS).to(bits, bitcast=True)
        # All ones would be waited for for ever.
        sent = tl.where(own == -1, LARGEST, own).to(bits)
        place = ((tl.load(turns + row) * SIZE + RANK) * MAX_ROWS + row) * SLOT
        for other in tl.static_range(SIZE):
            if other != RANK:
                slot = tl.multiple_of(tl.load(slots + other).to(tl.pointer_type(bits)), 16)
                tl.store(slot + place + columns, sent, mask=is_column, cache_modifier=".wt")
    # Loaded while the rows are on their way.
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
                # The maximum is over all threads, so that after it each knows what all have read.
                while tl.max((addend == -1).to(tl.int32), 0) == 1:
                    addend = tl.load(slot, mask=is_column, other=0, volatile=True)
                tl.store(slot, tl.full([BLOCK], -1, bits), mask=is_column)
            wide = addend.to(dtype, bitcast=True).to(tl.float32)
            if rank == 0:
                total = wide
            else:
                total += wide
        # Every thread has read it.
        tl.store(turns + row, 1 - turn)
        # Rounded after each sum, as two kernels do.
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
