"""Triton kernels of the gated delta rule in chunks; see `shared.kernels.delta_layer`.

`prepare` computes for all chunks in parallel what does not depend on the state before them; `scan`
then advances a lane's state chunk by chunk. Turns of a few chunks bound the memory between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.delta_layer import DeltaPrompts
from shared.kernels.delta_layer_triton import (
    layout_sizes,
    layout_strides,
    silu,
    softplus,
    stored_places,
)
from shared.kernels.delta_rule import CHUNK, EPS, DeltaShape, DeltaWeights

# Columns of a state, with all their rows, that one program holds in registers.
_BLOCK_VALUES = 32
_FEWEST_COLUMNS = 16  # of a product
# Chunks per turn: 64 MiB with 16 key heads and 32 value heads of 128.
_TURN_CHUNKS = 32
# Three products with mantissas of 11 bits have the precision of one in float32.
_PRECISION = tl.constexpr("tf32x3")


@triton.jit  # type: ignore[untyped-decorator]
def convolved(  # type: ignore[no-untyped-def]
    stored, own, is_own, taps, channels, is_channel, plane_stride, layer_stride,
    WIDTH: tl.constexpr, NUM_LAYERS: tl.constexpr, STAMP_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Returns some channels of the tokens of a chunk, `[CHUNK, C]` float32.

    Args:
        own: `[CHUNK]`, pointers to the first place of each token's window.
    """
    first = stored + stored_places(
        STAMP_SIZE + channels, plane_stride, layer_stride, WIDTH, NUM_LAYERS
    )
    mixed = tl.zeros((own.shape[0], channels.shape[0]), tl.float32)
    for tap in tl.static_range(WINDOW):
        slots = tl.load(own + 2 * tap, mask=is_own, other=-1)
        is_there = (slots >= 0)[:, None] & is_channel[None, :]
        rows = tl.load(first[None, :] + slots[:, None] * WIDTH, mask=is_there, other=0.0)
        weights = tl.load(taps + channels * WINDOW + tap, mask=is_channel, other=0.0)
        mixed += rows.to(tl.float32) * weights.to(tl.float32)[None, :]
    return silu(mixed)


@triton.jit  # type: ignore[untyped-decorator]
def unit_rows(rows, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns rows scaled to length 1."""
    return rows / tl.sqrt(tl.sum(rows * rows, 1) + EPS)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def unit_inverse(lower, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the inverse of the identity plus a strictly lower triangular matrix, row by row."""
    numbers = tl.arange(0, SIZE)
    inverse = (numbers[:, None] == numbers[None, :]).to(tl.float32)
    for number in range(1, SIZE):
        is_row = (numbers == number)[:, None]
        row = tl.sum(tl.where(is_row, lower, 0.0), 0)
        inverse -= tl.where(is_row, tl.sum(row[:, None] * inverse, 0)[None, :], 0.0)
    return inverse


@triton.jit  # type: ignore[untyped-decorator]
def prepare(  # type: ignore[no-untyped-def]
    stored, chunks, places, taps, log_decay, decay_bias,
    all_queries, all_keys, solvers, all_scores, totals, plane_stride, layer_stride,
    WIDTH: tl.constexpr, NUM_LAYERS: tl.constexpr, STAMP_SIZE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr, NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, EPS: tl.constexpr, BLOCK_KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Prepares one chunk of one head: its queries and keys `[CHUNK, KEY_DIM]`; the logarithm of the
    decay since its begin `[CHUNK]`; and two matrices `[CHUNK, CHUNK]`: the solver, which maps
    values minus what keys read of the state to errors, and the weights with which queries read
    errors.

    Source: Yang et al., Gated Delta Networks, arXiv 2412.06464, section 3.3.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(chunks + 2 * chunk)
    num_tokens = tl.load(chunks + 2 * chunk + 1)
    tokens = tl.arange(0, CHUNK)
    is_own = tokens < num_tokens
    own = places + 2 * (first + tokens)
    keys = tl.arange(0, BLOCK_KEYS)
    is_key = keys < KEY_DIM
    num_keys: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    group: tl.constexpr = NUM_VALUE_HEADS // NUM_KEY_HEADS
    channels = head // group * KEY_DIM + keys
    queries = convolved(
        stored, own, is_own, taps, channels, is_key, plane_stride, layer_stride,
        WIDTH, NUM_LAYERS, STAMP_SIZE, WINDOW,
    )  # fmt: skip
    queries = unit_rows(queries, EPS) * SCALE
    key_rows = convolved(
        stored, own, is_own, taps, num_keys + channels, is_key, plane_stride, layer_stride,
        WIDTH, NUM_LAYERS, STAMP_SIZE, WINDOW,
    )  # fmt: skip
    key_rows = unit_rows(key_rows, EPS)
    slots = tl.load(own + 2 * (WINDOW - 1), mask=is_own, other=0)
    column = STAMP_SIZE + 2 * num_keys + NUM_VALUE_HEADS * VALUE_DIM + head
    updates = stored + stored_places(column, plane_stride, layer_stride, WIDTH, NUM_LAYERS)
    decays = stored + stored_places(
        column + NUM_VALUE_HEADS, plane_stride, layer_stride, WIDTH, NUM_LAYERS
    )
    update = tl.load(updates + slots * WIDTH, mask=is_own, other=0.0).to(tl.float32)
    update = tl.where(is_own, 1.0 / (1.0 + tl.exp(-update)), 0.0)
    decay = tl.load(decays + slots * WIDTH, mask=is_own, other=0.0).to(tl.float32)
    decay = softplus(decay + tl.load(decay_bias + head)) * -tl.exp(tl.load(log_decay + head))
    total = tl.cumsum(tl.where(is_own, decay, 0.0), 0)
    is_before = tokens[:, None] > tokens[None, :]
    is_seen = tokens[:, None] >= tokens[None, :]
    # Masked before `exp`: for tokens that are not seen the exponent is positive and may overflow.
    between = tl.exp(tl.where(is_seen, total[:, None] - total[None, :], 0.0))
    between = tl.where(is_seen, between, 0.0)
    alike = tl.dot(key_rows, tl.trans(key_rows), input_precision=_PRECISION)
    system = tl.where(is_before, update[:, None] * between * alike, 0.0)
    solver = unit_inverse(system, CHUNK) * update[None, :]
    scores = between * tl.dot(queries, tl.trans(key_rows), input_precision=_PRECISION)
    square = tokens[:, None] * CHUNK + tokens[None, :]
    own_head = chunk * NUM_VALUE_HEADS + head
    tl.store(solvers + own_head * (CHUNK * CHUNK) + square, solver)
    tl.store(all_scores + own_head * (CHUNK * CHUNK) + square, scores)
    tl.store(totals + own_head * CHUNK + tokens, total)
    # Queries and keys are the same for all value heads of a group.
    rows = (chunk * NUM_KEY_HEADS + head // group) * CHUNK + tokens
    rows = rows[:, None] * KEY_DIM + keys[None, :]
    is_written = is_key[None, :] & (head % group == 0)
    tl.store(all_queries + rows, queries, mask=is_written)
    tl.store(all_keys + rows, key_rows, mask=is_written)


# Not specialised: each number of chunks would be compiled anew.
@triton.jit(do_not_specialize=["first_chunk", "end_chunk"])  # type: ignore[untyped-decorator]
def scan(  # type: ignore[no-untyped-def]
    stored, table, chunks, places, first_chunk, end_chunk, states, between_turns, read, taps,
    all_queries, all_keys, solvers, all_scores, totals, plane_stride, layer_stride,
    WIDTH: tl.constexpr, NUM_LAYERS: tl.constexpr, STAMP_SIZE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr, NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Advances some columns of one head's state in a lane by the lane's prepared chunks.

    Source: that of `prepare`.
    """
    lane, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens, keys = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEYS)
    values = tl.program_id(2) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    num_keys: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    channels = 2 * num_keys + head * VALUE_DIM + values
    key_head = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    square = tokens[:, None] * CHUNK + tokens[None, :]
    own_head_state = head * (KEY_DIM * VALUE_DIM) + keys[:, None] * VALUE_DIM + values[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    state_size: tl.constexpr = NUM_VALUE_HEADS * KEY_DIM * VALUE_DIM
    lane_first = tl.load(table + 4 * lane + 2).to(tl.int32)
    lane_end = lane_first + tl.load(table + 4 * lane + 3).to(tl.int32)
    begin, end = tl.maximum(lane_first, first_chunk), tl.minimum(lane_end, end_chunk)
    between = between_turns + lane * state_size + own_head_state
    source, target = tl.load(table + 4 * lane), tl.load(table + 4 * lane + 1)
    is_first, is_here = begin == lane_first, begin < end
    from_states = states + source * state_size + own_head_state
    state = tl.load(from_states, mask=is_state & is_first & is_here, other=0.0)
    if not is_first:
        state = tl.load(between, mask=is_state & is_here, other=0.0)
    for chunk in range(begin, end):
        first = tl.load(chunks + 2 * chunk)
        is_own = tokens < tl.load(chunks + 2 * chunk + 1)
        own = places + 2 * (first + tokens)
        wanted = convolved(
            stored, own, is_own, taps, channels, is_value, plane_stride, layer_stride,
            WIDTH, NUM_LAYERS, STAMP_SIZE, WINDOW,
        )  # fmt: skip
        turn = (chunk - first_chunk).to(tl.int64)
        rows = ((turn * NUM_KEY_HEADS + key_head) * CHUNK + tokens)[:, None] * KEY_DIM
        rows += keys[None, :]
        own_head = turn * NUM_VALUE_HEADS + head
        total = tl.load(totals + own_head * CHUNK + tokens)
        since_begin = tl.exp(total)[:, None]
        key_rows = tl.load(all_keys + rows, mask=is_key[None, :], other=0.0)
        wanted -= since_begin * tl.dot(key_rows, state, input_precision=_PRECISION)
        solver = tl.load(solvers + own_head * (CHUNK * CHUNK) + square)
        errors = tl.dot(solver, wanted, input_precision=_PRECISION)
        queries = tl.load(all_queries + rows, mask=is_key[None, :], other=0.0)
        found = since_begin * tl.dot(queries, state, input_precision=_PRECISION)
        scores = tl.load(all_scores + own_head * (CHUNK * CHUNK) + square)
        found += tl.dot(scores, errors, input_precision=_PRECISION)
        # Missing tokens do not decay the state, so the last one has the decay of the chunk.
        whole = tl.sum(tl.where(tokens == CHUNK - 1, total, 0.0), 0)
        left = tl.trans(key_rows * tl.exp(whole - total)[:, None])
        state = tl.exp(whole) * state + tl.dot(left, errors, input_precision=_PRECISION)
        row = tl.load(own + 2 * (WINDOW - 1) + 1, mask=is_own, other=-1)
        targets = (row[:, None] * NUM_VALUE_HEADS + head) * VALUE_DIM + values[None, :]
        is_wanted = (row >= 0)[:, None] & is_value[None, :]
        tl.store(read + targets, found.to(read.dtype.element_ty), mask=is_wanted)
    tl.store(between, state, mask=is_state & is_here & (end < lane_end))
    to_states = states + target * state_size + own_head_state
    tl.store(to_states, state, mask=is_state & is_here & (end == lane_end) & (target >= 0))


def fused_advance_prompts(
    stored: Tensor,
    prompts: DeltaPrompts,
    states: Tensor,
    read: Tensor,
    shape: DeltaShape,
    weights: DeltaWeights,
) -> None:
    assert states.is_contiguous()
    assert read.is_contiguous()
    assert weights.taps.is_contiguous()
    num_turn = min(_TURN_CHUNKS, len(prompts.chunks))

    def empty(num_heads: int, *sizes: int) -> Tensor:
        size = (num_turn, num_heads, CHUNK, *sizes)
        return torch.empty(size, dtype=torch.float32, device=stored.device)

    queries, keys = (empty(shape.num_key_heads, shape.key_dim) for _ in range(2))
    solvers, scores = (empty(shape.num_value_heads, CHUNK) for _ in range(2))
    prepared = queries, keys, solvers, scores, empty(shape.num_value_heads)
    between_turns = torch.empty(
        (len(prompts.table), *states.shape[1:]), dtype=torch.float32, device=stored.device
    )
    constants = {
        **layout_sizes(stored),
        "NUM_KEY_HEADS": shape.num_key_heads,
        "NUM_VALUE_HEADS": shape.num_value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "WINDOW": shape.window,
        "BLOCK_KEYS": max(_FEWEST_COLUMNS, triton.next_power_of_2(shape.key_dim)),
        "CHUNK": CHUNK,
    }
    for first in range(0, len(prompts.chunks), num_turn):
        chunks = prompts.chunks[first : first + num_turn]
        prepare[(len(chunks), shape.num_value_heads)](
            stored, chunks, prompts.places, weights.taps, weights.log_decay, weights.decay_bias,
            *prepared, *layout_strides(stored), **constants, SCALE=shape.key_dim**-0.5, EPS=EPS,
            num_warps=8, num_stages=1,
        )  # fmt: skip
        num_blocks = triton.cdiv(shape.value_dim, _BLOCK_VALUES)
        scan[(len(prompts.table), shape.num_value_heads, num_blocks)](
            stored, prompts.table, prompts.chunks, prompts.places, first, first + len(chunks),
            states, between_turns, read, weights.taps, *prepared, *layout_strides(stored),
            **constants, BLOCK_VALUES=_BLOCK_VALUES, num_warps=4, num_stages=1,
        )  # fmt: skip
