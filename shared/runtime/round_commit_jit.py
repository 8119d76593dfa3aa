"""Triton kernels that end a round: the accepted path, its keys, values and features."""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.dependent_jit import begin
from shared.kernels.fused_jit import summed


@triton.jit(do_not_specialize=["number_stride"])  # type: ignore[untyped-decorator]
def accept_trees(  # type: ignore[no-untyped-def]
    drawn, token_ids, parents, visible, slots, numbers,
    result, source_rows, source_slots, target_slots, number_stride,
    NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, RESULT_COUNTS: tl.constexpr,
    LENGTH: tl.constexpr, OPEN: tl.constexpr, ACTIVE: tl.constexpr, ENDED: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does for one tree what `accept_rows` does, and commits it to the state."""
    begin(IS_DEPENDENT)
    sequence = tl.program_id(0)
    own = sequence * NUM_ROWS
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < NUM_ROWS
    token = tl.load(token_ids + own + rows, mask=is_row, other=-1)
    parent = tl.load(parents + own + rows, mask=is_row, other=0)
    wanted = tl.load(drawn + own + parent, mask=is_row, other=0)
    own_drawn = tl.load(drawn + own + rows, mask=is_row, other=0)
    matches = ((token == wanted) & (own_drawn >= 0) | (rows == 0)).to(tl.int32)
    is_square = is_row[:, None] & is_row[None, :]
    seen = tl.load(
        visible + (own + rows)[:, None] * NUM_ROWS + rows[None, :], mask=is_square, other=0
    ).to(tl.int32)
    is_accepted = (tl.min(tl.maximum(1 - seen, matches[None, :]), 1) == 1) & is_row
    place = tl.cumsum(is_accepted.to(tl.int32), 0) - 1
    count = tl.sum(is_accepted.to(tl.int32), 0)
    num_nodes = tl.sum((is_row & (rows > 0) & (token >= 0)).to(tl.int64), 0)
    # The path, then the rows that stay where they are.
    steps = tl.arange(0, BLOCK_WIDTH)
    is_step = steps < WIDTH
    out = sequence * WIDTH
    tl.store(source_rows + out + place, (own + rows).to(tl.int64), mask=is_accepted)
    tl.store(
        source_slots + out + place,
        tl.load(slots + own + rows, mask=is_row, other=0), mask=is_accepted,
    )  # fmt: skip
    slot = tl.load(slots + own + steps, mask=is_step, other=0)
    is_beyond = is_step & (steps >= count)
    tl.store(target_slots + out + steps, slot, mask=is_step)
    tl.store(source_slots + out + steps, slot, mask=is_beyond)
    tl.store(source_rows + out + steps, (own + steps).to(tl.int64), mask=is_beyond)
    # What the host reads, and what the next round starts from.
    state = numbers + sequence * number_stride
    is_active = tl.load(state + ACTIVE)
    answer = result + sequence * (RESULT_COUNTS + WIDTH)
    tl.store(answer + RESULT_COUNTS + place, own_drawn, mask=is_accepted)
    tl.store(answer + RESULT_COUNTS + steps, slot * 0, mask=is_beyond)
    tl.store(answer, count * is_active)
    tl.store(answer + 1, num_nodes)
    if is_active == 1:
        tl.store(state + TAIL + place, own_drawn, mask=is_accepted)
        tl.store(state + LENGTH, tl.load(state + LENGTH) + count)
        tl.store(state + OPEN, count.to(tl.int64))
        last_row = tl.max(tl.where(is_accepted, rows, 0), 0)
        tl.store(state + ENDED, last_row.to(tl.int64))


@triton.jit(do_not_specialize=["layer_stride"])  # type: ignore[untyped-decorator]
def move_path(  # type: ignore[no-untyped-def]
    storage, source_slots, target_slots, layer_stride,
    WIDTH: tl.constexpr, TOKEN_SIZE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Moves the tokens of one path within one layer's keys or values."""
    begin(IS_DEPENDENT)
    sequence = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    steps = tl.arange(0, BLOCK_WIDTH)
    is_step = steps < WIDTH
    sources = tl.load(source_slots + sequence * WIDTH + steps, mask=is_step, other=0)
    targets = tl.load(target_slots + sequence * WIDTH + steps, mask=is_step, other=0)
    is_moved = is_step & (sources != targets)
    if tl.sum(is_moved.to(tl.int32), 0) == 0:
        return
    elements = tl.program_id(2) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_element = is_moved[:, None] & (elements < TOKEN_SIZE)[None, :]
    base = storage + layer * layer_stride
    values = tl.load(
        base + sources[:, None] * TOKEN_SIZE + elements[None, :], mask=is_element, other=0.0
    )
    # A token may be another one's target: all are read before any is written.
    tl.debug_barrier()
    tl.store(base + targets[:, None] * TOKEN_SIZE + elements[None, :], values, mask=is_element)


@triton.jit(do_not_specialize=["first_part"])  # type: ignore[untyped-decorator]
def gather_parts(  # type: ignore[no-untyped-def]
    first, second, third, fourth, rows, joined, first_part,
    NUM_PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copies one named row of one of four parts of the features to its place among all parts."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source = first
    if part == 1:
        source = second
    if part == 2:
        source = third
    if part == 3:
        source = fourth
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    origin = tl.load(rows + row)
    values = tl.load(source + origin * SIZE + columns, mask=is_column, other=0.0)
    target = joined + (row * NUM_PARTS + first_part + part) * SIZE
    tl.store(target + columns, values, mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(  # type: ignore[no-untyped-def]
    rows, like, slots, stored,
    NUM_PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes some columns of one row, in the dtype of `like` first, to the row's slot."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    dtype = like.dtype.element_ty
    values = summed(
        rows, row * SIZE + columns, is_column, tl.num_programs(0) * SIZE, dtype, NUM_PARTS
    )
    target = stored + tl.load(slots + row) * SIZE + columns
    tl.store(target, values.to(stored.dtype.element_ty), mask=is_column)
