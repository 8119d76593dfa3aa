"""Triton kernels of a gated delta layer; see `shared.kernels.delta_layer`.

Every launch of `advance` runs the same binary with the same blocks and one warp. So decode steps,
trees and prompts sum in the same order, and a token has the same bits in all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.delta_layer import STAMP_SIZE, DeltaLanes
from shared.kernels.delta_rule import EPS, DeltaShape, DeltaWeights
from shared.kernels.dependent_jit import begin, early
from shared.kernels.fused_jit import before_weight
from shared.kernels.launch import dependent_launch

_STORED_COLUMNS = 1024
_BLOCK_HEADS = 8
# Columns of a state, with all their rows, that one program holds in registers.
_BLOCK_VALUES = 16
# Lanes that run at the same time, with one program for each head and block; more lanes take turns.
# With 32 heads of 128 these fill a GPU, and a call without lanes costs little more than a launch.
_LANE_PROGRAMS = 8


@triton.jit  # type: ignore[untyped-decorator]
def stored_places(  # type: ignore[no-untyped-def]
    columns, plane_stride, layer_stride, WIDTH: tl.constexpr, NUM_LAYERS: tl.constexpr
):
    """Returns the offsets of a stored row's columns from the row's slot."""
    piece = columns // WIDTH
    planes = (piece // NUM_LAYERS).to(tl.int64) * plane_stride
    return planes + (piece % NUM_LAYERS).to(tl.int64) * layer_stride + columns % WIDTH


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(  # type: ignore[no-untyped-def]
    stored, slots, stamps, channels, gates, plane_stride, layer_stride, channel_stride, gate_stride,
    WIDTH: tl.constexpr, NUM_LAYERS: tl.constexpr, STAMP_SIZE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, NUM_GATES: tl.constexpr, BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes some columns of one token's row."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    digits = tl.load(stamps + row) >> (8 * tl.minimum(columns, STAMP_SIZE - 1)).to(tl.int64)
    channel = columns - STAMP_SIZE
    gate = channel - NUM_CHANNELS
    is_channel = (channel >= 0) & (gate < 0)
    is_gate = (gate >= 0) & (gate < NUM_GATES)
    own = tl.load(channels + row * channel_stride + channel, mask=is_channel, other=0.0)
    own_gates = tl.load(gates + row * gate_stride + gate, mask=is_gate, other=0.0)
    values = tl.where(is_channel, own.to(tl.float32), own_gates.to(tl.float32))
    values = tl.where(channel < 0, (digits & 255).to(tl.float32), values)
    places = stored_places(columns, plane_stride, layer_stride, WIDTH, NUM_LAYERS)
    target = stored + slot * WIDTH + places
    tl.store(target, values.to(stored.dtype.element_ty), mask=gate < NUM_GATES)


@triton.jit
def silu(values):  # type: ignore[no-untyped-def]
    """Returns `values * sigmoid(values)` of float32 numbers."""
    return values / (1.0 + tl.exp(-values))


@triton.jit  # type: ignore[untyped-decorator]
def unit(vector, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the vector scaled to length 1."""
    return vector / tl.sqrt(tl.sum(vector * vector, 0) + EPS)


@triton.jit
def softplus(value):  # type: ignore[no-untyped-def]
    """Returns `log(1 + exp(value))`, with full relative precision for small results."""
    power = tl.exp(tl.minimum(value, 20.0))
    rounded = 1.0 + power
    # The factor compensates the rounding of `1 + power`.
    exact = tl.where(rounded == 1.0, power, tl.log(rounded) * (power / (rounded - 1.0)))
    return tl.where(value > 20.0, value, exact)


@triton.jit  # type: ignore[untyped-decorator]
def token_inputs(  # type: ignore[no-untyped-def]
    places, is_there, first_query, first_key, first_value, first_update, first_decay,
    is_key, is_value, WIDTH: tl.constexpr, WINDOW: tl.constexpr, BLOCK_WINDOW: tl.constexpr,
):  # fmt: skip
    """Returns the inputs of a token's step: stored queries, keys and values `[C, W]` of the tokens
    in its window, zeros for missing ones; its update and decay; the row that takes its result."""
    window = tl.arange(0, BLOCK_WINDOW)
    slots = tl.load(places + 2 * window, mask=(window < WINDOW) & is_there, other=-1)
    slot = tl.load(places + 2 * (WINDOW - 1), mask=is_there, other=0)
    row = tl.load(places + 2 * (WINDOW - 1) + 1, mask=is_there, other=-1)
    is_slot = (slots >= 0)[None, :]
    rows = slots[None, :] * WIDTH
    keys_there = is_key[:, None] & is_slot
    query = tl.load(first_query[:, None] + rows, mask=keys_there, other=0.0)
    key = tl.load(first_key[:, None] + rows, mask=keys_there, other=0.0)
    value = tl.load(first_value[:, None] + rows, mask=is_value[:, None] & is_slot, other=0.0)
    update = tl.load(first_update + slot * WIDTH, mask=is_there, other=0.0)
    decay = tl.load(first_decay + slot * WIDTH, mask=is_there, other=0.0)
    return query, key, value, update, decay, row


@triton.jit  # type: ignore[untyped-decorator]
def advance(  # type: ignore[no-untyped-def]
    stored, table, count, places, states, read, taps, log_decay, decay_bias,
    plane_stride, layer_stride,
    WIDTH: tl.constexpr, NUM_LAYERS: tl.constexpr, STAMP_SIZE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr, NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, EPS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr, BLOCK_WINDOW: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Advances some columns of one head's states, one lane after another.

    Source: Yang et al., Gated Delta Networks, arXiv 2412.06464, equation 10.
    """
    head = tl.program_id(1)
    keys = tl.arange(0, BLOCK_KEYS)
    values = tl.program_id(2) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    window = tl.arange(0, BLOCK_WINDOW)
    is_key = keys < KEY_DIM
    is_value = values < VALUE_DIM
    is_tap = window < WINDOW
    num_keys: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    num_channels: tl.constexpr = 2 * num_keys + NUM_VALUE_HEADS * VALUE_DIM
    query_channels = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS) * KEY_DIM + keys
    key_channels = num_keys + query_channels
    value_channels = 2 * num_keys + head * VALUE_DIM + values
    query_mask = is_key[:, None] & is_tap[None, :]
    value_mask = is_value[:, None] & is_tap[None, :]
    query_taps = early(taps + query_channels[:, None] * WINDOW + window[None, :], query_mask, True)
    key_taps = early(taps + key_channels[:, None] * WINDOW + window[None, :], query_mask, True)
    value_taps = early(taps + value_channels[:, None] * WINDOW + window[None, :], value_mask, True)
    rate = -tl.exp(tl.load(log_decay + head))
    bias = tl.load(decay_bias + head)
    first_query = stored + stored_places(
        STAMP_SIZE + query_channels, plane_stride, layer_stride, WIDTH, NUM_LAYERS
    )
    first_key = stored + stored_places(
        STAMP_SIZE + key_channels, plane_stride, layer_stride, WIDTH, NUM_LAYERS
    )
    first_value = stored + stored_places(
        STAMP_SIZE + value_channels, plane_stride, layer_stride, WIDTH, NUM_LAYERS
    )
    update_column = STAMP_SIZE + num_channels + head
    first_update = stored + stored_places(
        update_column, plane_stride, layer_stride, WIDTH, NUM_LAYERS
    )
    first_decay = stored + stored_places(
        update_column + NUM_VALUE_HEADS, plane_stride, layer_stride, WIDTH, NUM_LAYERS
    )
    own_state = keys[:, None] * VALUE_DIM + values[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    begin(IS_DEPENDENT)
    num_lanes = tl.load(count).to(tl.int32)
    for lane in range(tl.program_id(0), num_lanes, tl.num_programs(0)):
        source = tl.load(table + 4 * lane)
        target = tl.load(table + 4 * lane + 1)
        first = tl.load(table + 4 * lane + 2)
        num_tokens = tl.load(table + 4 * lane + 3).to(tl.int32)
        from_state = states + (source * NUM_VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
        state = tl.load(from_state + own_state, mask=is_state, other=0.0)
        own = places + 2 * first
        query_window, key_window, value_window, update, decay, row = token_inputs(
            own, num_tokens > 0, first_query, first_key, first_value, first_update, first_decay,
            is_key, is_value, WIDTH, WINDOW, BLOCK_WINDOW,
        )  # fmt: skip
        for token in range(num_tokens):
            # The next token's inputs are loaded while this token is computed.
            next_query, next_key, next_value, next_update, next_decay, next_row = token_inputs(
                own + 2 * (token + 1), token + 1 < num_tokens,
                first_query, first_key, first_value, first_update, first_decay,
                is_key, is_value, WIDTH, WINDOW, BLOCK_WINDOW,
            )  # fmt: skip
            query = silu(tl.sum(query_window.to(tl.float32) * query_taps, 1))
            key = unit(silu(tl.sum(key_window.to(tl.float32) * key_taps, 1)), EPS)
            value = silu(tl.sum(value_window.to(tl.float32) * value_taps, 1))
            state *= tl.exp(rate * softplus(decay.to(tl.float32) + bias))
            error = value - tl.sum(state * key[:, None], 0)
            error *= 1.0 / (1.0 + tl.exp(-update.to(tl.float32)))
            state += key[:, None] * error[None, :]
            found = tl.sum(state * (unit(query, EPS) * SCALE)[:, None], 0)
            target_row = read + (row * NUM_VALUE_HEADS + head) * VALUE_DIM + values
            tl.store(target_row, found.to(read.dtype.element_ty), mask=is_value & (row >= 0))
            query_window, key_window, value_window = next_query, next_key, next_value
            update, decay, row = next_update, next_decay, next_row
        to_state = states + (target * NUM_VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
        tl.store(to_state + own_state, state, mask=is_state & (target >= 0))


@triton.jit  # type: ignore[untyped-decorator]
def norm_heads(  # type: ignore[no-untyped-def]
    read, gates, weight, results, gate_stride, eps,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes the gated norm of some heads of one row."""
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < DIM
    weights = early(weight + dims, is_dim, True)
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_element = (heads < NUM_HEADS)[:, None] & is_dim[None, :]
    places = heads[:, None] * DIM + dims[None, :]
    own = row * (NUM_HEADS * DIM) + places
    values = tl.load(read + own, mask=is_element, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
    # Rounded where a separate norm would round.
    normed = before_weight(wide * scale, values.dtype, weight.dtype.element_ty)
    normed = (normed * weights[None, :]).to(values.dtype).to(tl.float32)
    gate = tl.load(gates + row * gate_stride + places, mask=is_element, other=0.0).to(tl.float32)
    tl.store(results + own, (normed * silu(gate)).to(values.dtype), mask=is_element)


def fused_store_inputs(
    stored: Tensor, slots: Tensor, stamps: Tensor, channels: Tensor, gates: Tensor
) -> None:
    num_rows, num_channels = channels.shape
    assert channels.stride(1) == gates.stride(1) == 1
    if num_rows:
        num_columns = STAMP_SIZE + num_channels + gates.shape[1]
        store_rows[(num_rows, triton.cdiv(num_columns, _STORED_COLUMNS))](
            stored, slots, stamps, channels, gates,
            *layout_strides(stored), channels.stride(0), gates.stride(0), **layout_sizes(stored),
            NUM_CHANNELS=num_channels, NUM_GATES=gates.shape[1], BLOCK=_STORED_COLUMNS,
            num_warps=4, **dependent_launch(stored.device, num_rows),
        )  # fmt: skip


def fused_advance_lanes(
    stored: Tensor,
    lanes: DeltaLanes,
    states: Tensor,
    read: Tensor,
    shape: DeltaShape,
    weights: DeltaWeights,
) -> None:
    assert states.is_contiguous()
    assert read.is_contiguous()
    assert weights.taps.is_contiguous()
    num_programs = min(len(lanes.table), _LANE_PROGRAMS)
    if num_programs:
        num_blocks = triton.cdiv(shape.value_dim, _BLOCK_VALUES)
        advance[(num_programs, shape.num_value_heads, num_blocks)](
            stored, lanes.table, lanes.count, lanes.places, states, read,
            weights.taps, weights.log_decay, weights.decay_bias,
            *layout_strides(stored), **layout_sizes(stored),
            NUM_KEY_HEADS=shape.num_key_heads, NUM_VALUE_HEADS=shape.num_value_heads,
            KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim, WINDOW=shape.window,
            SCALE=shape.key_dim**-0.5, EPS=EPS,
            BLOCK_KEYS=triton.next_power_of_2(shape.key_dim), BLOCK_VALUES=_BLOCK_VALUES,
            BLOCK_WINDOW=triton.next_power_of_2(shape.window), num_warps=1,
            # Always as for one row: another launch option would be another binary.
            **dependent_launch(stored.device, 1),
        )  # fmt: skip


def fused_gated_norm(read: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    num_rows, dim = len(read), len(weight)
    num_heads = read.shape[1] // dim
    assert read.is_contiguous()
    assert gates.stride(1) == 1
    results = torch.empty_like(read)
    if num_rows:
        norm_heads[(num_rows, triton.cdiv(num_heads, _BLOCK_HEADS))](
            read, gates, weight, results, gates.stride(0), eps,
            NUM_HEADS=num_heads, DIM=dim, BLOCK_HEADS=_BLOCK_HEADS,
            BLOCK_DIM=triton.next_power_of_2(dim), num_warps=4,
            **dependent_launch(read.device, num_rows),
        )  # fmt: skip
    return results


def layout_strides(stored: Tensor) -> tuple[int, int]:
    return stored.stride(0), stored.stride(1)


def layout_sizes(stored: Tensor) -> dict[str, int]:
    """Returns the compile-time constants of the layout of stored rows."""
    num_layers, num_heads, head_dim = stored.shape[1], *stored.shape[3:]
    assert stored.stride(2) == num_heads * head_dim
    return {
        "WIDTH": num_heads * head_dim,
        "NUM_LAYERS": num_layers,
        "STAMP_SIZE": STAMP_SIZE,
    }
