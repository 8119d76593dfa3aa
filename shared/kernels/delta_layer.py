"""The steps of a gated delta layer between its products: inputs are stored, states are advanced
over stored inputs, and the results of heads are normalised.

A layer's stored rows are its part of the cache's storage,
`[num_planes, layers_each, num_slots, num_kv_heads, head_dim]`. Each row begins with a stamp, which
the inputs of one token follow, over several layers of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.delta_rule import (
    CHUNK,
    DeltaShape,
    DeltaWeights,
    batch_invariant_silu,
    delta_chunk,
    delta_scan,
)
from shared.kernels.kernel_settings import dispatched
from shared.kernels.pointwise import plain_rms_norm

STAMP_SIZE = 8
"""Elements of a row that hold its stamp: digits to the base 256, exact in every dtype."""
NOWHERE = -1
# Tokens and lanes that the plain version advances together; they bound its memory.
_BLOCK_TOKENS, _GROUP_LANES = 64, 64


@dataclass(frozen=True, slots=True)
class DeltaLanes:
    """Tokens that states advance by, in up to N lanes.

    No lane starts from a state that another lane of the same call writes.

    Attributes:
        table: `[N, 4]` int64, per lane: the state it starts from; the state it writes, or
            `NOWHERE`; its first place, and its number of tokens.
        count: `[1]` int64, lanes in use, the first ones.
        places: `[P, 2]` int64, places of all lanes: the slot of a token, and the row that takes the
            token's result; either or both may be `NOWHERE`. A lane's places begin with the
            `window - 1` tokens before its own, which have no row.
    """

    table: Tensor
    count: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class DeltaPrompts:
    """Lanes of many tokens, which are cut into chunks.

    Attributes:
        table: `[N, 4]` int64, per lane: the state it starts from; the state it writes, or
            `NOWHERE`; its first chunk, and its number of chunks.
        chunks: `[C, 2]` int64, lane after lane, per chunk: its first place, and its number of
            tokens, 1 to `CHUNK`.
        places: see `DeltaLanes`; a chunk's places begin with the tokens that its first window sees.
    """

    table: Tensor
    chunks: Tensor
    places: Tensor


@dispatched("delta_layer_triton")
def store_inputs(
    stored: Tensor, slots: Tensor, stamps: Tensor, channels: Tensor, gates: Tensor
) -> None:
    """Stores the inputs of tokens with their stamps.

    Args:
        slots: `[T]` int64.
        stamps: `[T]` int64, not negative.
        channels: `[T, num_channels]`; rows need not be contiguous.
        gates: `[T, 2 * num_value_heads]`.
    """
    digits = stamps[:, None] >> 8 * torch.arange(STAMP_SIZE, device=stamps.device) & 255
    rows = torch.cat((digits.to(channels.dtype), channels, gates), dim=1)
    num_planes, num_layers, _, num_heads, head_dim = stored.shape
    width = num_planes * num_layers * num_heads * head_dim
    padded = torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
    parts = padded.view(-1, num_planes, num_layers, num_heads, head_dim)
    stored.index_copy_(2, slots, parts.permute(1, 2, 0, 3, 4).to(stored.dtype))


def stored_inputs(stored: Tensor, slots: Tensor) -> Tensor:
    """Returns the inputs that `store_inputs` stored at `slots` `[N]` int64, without stamps but with
    padding, `[N, R]`."""
    rows = stored.index_select(2, slots)
    return rows.permute(2, 0, 1, 3, 4).flatten(1)[:, STAMP_SIZE:]


@dispatched("delta_layer_triton")
def advance_lanes(
    stored: Tensor,
    lanes: DeltaLanes,
    states: Tensor,
    read: Tensor,
    shape: DeltaShape,
    weights: DeltaWeights,
) -> None:
    """Advances states over stored inputs; writes the lanes' final states, and the results of rows.

    A token's bits depend only on the tokens before it, however these are divided into lanes and
    calls.

    Args:
        states: `[any, num_value_heads, key_dim, value_dim]` float32.
        read: `[T, value_size]`, the results; rows without a place are not changed.
    """
    table = lanes.table[: int(lanes.count)]
    for first in range(0, len(table), _GROUP_LANES):
        group = table[first : first + _GROUP_LANES]
        sources, targets, _, lengths = group.unbind(1)
        lane_states = states.index_select(0, sources)
        for start in range(0, int(lengths.max()), _BLOCK_TOKENS):
            # Lanes that have ended are left out of further blocks.
            [active] = torch.nonzero(lengths > start, as_tuple=True)
            block = _Block.of(group[active], lanes.places, start, shape.window - 1)
            inputs = stored_inputs(stored, block.slots.flatten()).view(*block.slots.shape, -1)
            advanced, results = delta_scan(
                inputs, block.is_there, lane_states[active], shape, weights
            )
            lane_states.index_copy_(0, active, advanced)
            has_row = block.rows != NOWHERE
            wanted = results[has_row].flatten(1).to(read.dtype)
            read.index_copy_(0, block.rows[has_row], wanted)
        has_target = targets != NOWHERE
        states.index_copy_(0, targets[has_target], lane_states[has_target])


@dispatched("delta_chunks_triton")
def advance_prompts(
    stored: Tensor,
    prompts: DeltaPrompts,
    states: Tensor,
    read: Tensor,
    shape: DeltaShape,
    weights: DeltaWeights,
) -> None:
    """As `advance_lanes`, but many times as fast; sums have another order, so rounding differs. A
    token's bits depend on the tokens before it and on where chunks begin.

    Args: those of `advance_lanes`.
    """
    history = shape.window - 1
    for source, target, first, count in prompts.table.tolist():
        state = states[source]
        for place, num_tokens in prompts.chunks[first : first + count].tolist():
            chunk_places = prompts.places[place : place + history + num_tokens]
            slots, rows = torch.nn.functional.pad(
                chunk_places, (0, 0, 0, CHUNK - num_tokens), value=NOWHERE
            ).unbind(1)
            inputs = stored_inputs(stored, slots.clamp(min=0))
            state, results = delta_chunk(inputs, slots != NOWHERE, state, shape, weights)
            has_row = rows[history:] != NOWHERE
            wanted = results[has_row].flatten(1).to(read.dtype)
            read.index_copy_(0, rows[history:][has_row], wanted)
        if target != NOWHERE:
            states[target] = state


@dataclass(frozen=True, slots=True)
class _Block:
    """Up to M tokens of each of N lanes, padded.

    Attributes:
        slots: `[N, window - 1 + M]`; any slot where there is no token.
        is_there: `[N, window - 1 + M]`, whether there is a token.
        rows: `[N, M]`, the row that takes a token's result; `NOWHERE` for none.
    """

    slots: Tensor
    is_there: Tensor
    rows: Tensor

    @classmethod
    def of(cls, table: Tensor, places: Tensor, start: int, history: int) -> _Block:
        """Returns the next tokens, from `start`, of the lanes of a table."""
        size = min(_BLOCK_TOKENS, int(table[:, 3].max()) - start)
        offsets = start + torch.arange(history + size, device=table.device)
        is_own = offsets < history + table[:, 3:]
        lane_places = places[torch.where(is_own, table[:, 2:3] + offsets, 0)]
        slots, rows = lane_places.unbind(2)
        is_there = is_own & (slots != NOWHERE)
        rows = torch.where(is_own, rows, NOWHERE)[:, history:]
        return cls(torch.where(is_there, slots, 0), is_there, rows)


@dispatched("delta_layer_triton")
def gated_norm(read: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the norm of each head times `silu(gates)`, `[T, num_heads * D]`.

    Args:
        read: `[T, num_heads * D]`.
        gates: of the same shape; rows need not be contiguous.
        weight: `[D]`.
    """
    normed = plain_rms_norm(read.view(-1, len(weight)), weight, eps).view(read.shape)
    return (normed.float() * batch_invariant_silu(gates)).to(read.dtype)
