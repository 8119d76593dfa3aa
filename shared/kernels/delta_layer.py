"""The steps of a layer with a gated delta rule between its products: inputs are stored, states are
advanced over stored inputs, what heads read is normalised.

A layer's stored rows are its part of the cache's
storage, `[num_planes, layers_each, num_slots, num_kv_heads, head_dim]`: each begins with a stamp,
behind which are the inputs of one token, over as many of the cache's layers as they take.
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
"""Numbers of a row that hold its stamp: digits to the base 256, which every dtype has exactly."""
NOWHERE = -1
# What the plain version advances at once: bounds memory.
_BLOCK_TOKENS, _GROUP_LANES = 64, 64


@dataclass(frozen=True, slots=True)
class DeltaLanes:
    """Tokens that states advance by, in up to N lanes.

    No lane starts from a state that another lane of the same call ends in.

    Attributes:
        table: `[N, 4]` int64: the state that a lane starts from; the one it ends in, or `NOWHERE`;
            the first of its places, and how many tokens it has.
        count: `[1]` int64, lanes in use, the first ones.
        places: `[P, 2]` int64, of all lanes: the slot of a token, and the row that wants what the
            token reads, either or both `NOWHERE`. The `window - 1` tokens before a lane's own come
            first, and no row wants those.
    """

    table: Tensor
    count: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class DeltaPrompts:
    """Lanes of many tokens, which are cut into chunks.

    Attributes:
        table: `[N, 4]` int64: the state that a lane starts from; the one it ends in, or `NOWHERE`;
            the first of its chunks, and how many it has.
        chunks: `[C, 2]` int64, lane after lane: the first of its places, and how many tokens it
            has, 1 to `CHUNK`.
        places: see `DeltaLanes`; before a chunk's own come those that its first window sees.
    """

    table: Tensor
    chunks: Tensor
    places: Tensor


@dispatched("delta_layer_triton")
def store_inputs(
    stored: Tensor, slots: Tensor, stamps: Tensor, channels: Tensor, gates: Tensor
) -> None:
    """Stores what tokens give a layer.

    Args:
        stored: the layer's rows.
        slots: `[T]` int64.
        stamps: `[T]` int64, not negative.
        channels: `[T, num_channels]`; rows may lie apart.
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
    """Returns what `store_inputs` stored, without stamps, and what pads it, `[N, R]`, of `slots`
    `[N]` int64."""
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
    """Advances states over stored inputs; writes the states that lanes end in, and what rows read.

    A token's bits depend on the tokens before it alone, however these fall to lanes and calls.

    Args:
        stored: the layer's rows.
        states: `[any, num_value_heads, key_dim, value_dim]` float32.
        read: `[T, value_size]`; rows that no place names stay as they are.
    """
    table = lanes.table[: int(lanes.count)]
    for first in range(0, len(table), _GROUP_LANES):
        group = table[first : first + _GROUP_LANES]
        sources, targets, _, lengths = group.unbind(1)
        own = states.index_select(0, sources)
        for start in range(0, int(lengths.max()), _BLOCK_TOKENS):
            # A lane that has ended is in no further block.
            [alive] = torch.nonzero(lengths > start, as_tuple=True)
            block = _Block.of(group[alive], lanes.places, start, shape.window - 1)
            inputs = stored_inputs(stored, block.slots.flatten()).view(*block.slots.shape, -1)
            advanced, found = delta_scan(inputs, block.is_there, own[alive], shape, weights)
            own.index_copy_(0, alive, advanced)
            is_wanted = block.rows != NOWHERE
            wanted = found[is_wanted].flatten(1).to(read.dtype)
            read.index_copy_(0, block.rows[is_wanted], wanted)
        has_target = targets != NOWHERE
        states.index_copy_(0, targets[has_target], own[has_target])


@dispatched("delta_chunks_triton")
def advance_prompts(
    stored: Tensor,
    prompts: DeltaPrompts,
    states: Tensor,
    read: Tensor,
    shape: DeltaShape,
    weights: DeltaWeights,
) -> None:
    """Does what `advance_lanes` does, many times as fast, but for rounding: sums have another
    order. A token's bits depend on the tokens before it and on where chunks begin.

    Args: those of `advance_lanes`.
    """
    history = shape.window - 1
    for source, target, first, count in prompts.table.tolist():
        state = states[source]
        for place, num_tokens in prompts.chunks[first : first + count].tolist():
            own = prompts.places[place : place + history + num_tokens]
            slots, rows = torch.nn.functional.pad(
                own, (0, 0, 0, CHUNK - num_tokens), value=NOWHERE
            ).unbind(1)
            inputs = stored_inputs(stored, slots.clamp(min=0))
            state, found = delta_chunk(inputs, slots != NOWHERE, state, shape, weights)
            is_wanted = rows[history:] != NOWHERE
            wanted = found[is_wanted].flatten(1).to(read.dtype)
            read.index_copy_(0, rows[history:][is_wanted], wanted)
        if target != NOWHERE:
            states[target] = state


@dataclass(frozen=True, slots=True)
class _Block:
    """Some tokens of each of N lanes, M at most, padded.

    Attributes:
        slots: `[N, window - 1 + M]`, any where there is no token.
        is_there: `[N, window - 1 + M]`.
        rows: `[N, M]`, `NOWHERE` where none wants what a token reads.
    """

    slots: Tensor
    is_there: Tensor
    rows: Tensor

    @classmethod
    def of(cls, table: Tensor, places: Tensor, start: int, history: int) -> _Block:
        """Cuts the tokens from `start` on out of the lanes of a table."""
        size = min(_BLOCK_TOKENS, int(table[:, 3].max()) - start)
        offsets = start + torch.arange(history + size, device=table.device)
        is_own = offsets < history + table[:, 3:]
        own = places[torch.where(is_own, table[:, 2:3] + offsets, 0)]
        slots, rows = own.unbind(2)
        is_there = is_own & (slots != NOWHERE)
        rows = torch.where(is_own, rows, NOWHERE)[:, history:]
        return cls(torch.where(is_there, slots, 0), is_there, rows)


@dispatched("delta_layer_triton")
def gated_norm(read: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the norm of each head times `silu(gates)`, `[T, num_heads * D]`.

    Args:
        read: `[T, num_heads * D]`.
        gates: of the same shape; rows may lie apart.
        weight: `[D]`.
    """
    normed = plain_rms_norm(read.view(-1, len(weight)), weight, eps).view(read.shape)
    return (normed.float() * batch_invariant_silu(gates)).to(read.dtype)
