"""Linear attention by the gated delta rule, over inputs in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.kernels.delta_rule import DeltaShape, DeltaWeights, batch_invariant_silu, delta_scan
from shared.kernels.partials import Partials
from shared.kv.pool import KvPool
from shared.kv.states import STAMP_SIZE, StateBlock, StatePlan
from shared.layers.attention import AttentionShape, ForwardContext
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.tensor_group import Part


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Projections, convolution, recurrence and gated norm of one layer.

    Attributes:
        shape: of the attention layers beside it, whose cache holds its rows.
        delta: its own heads.
        channels: input to `num_channels + value_size`: what is convolved, and the output's gate.
        gates: input to `2 * num_value_heads`: update and decay.
        output: `value_size` back to the hidden size.
        norm: of each head that is read.
        layer: the cache's first layer with its rows.
        state: index of its states.
    """

    shape: AttentionShape
    delta: DeltaShape
    channels: Linear
    gates: Linear
    weights: DeltaWeights
    norm: RmsNorm
    output: Linear
    layer: int
    state: int

    def steadied(self) -> GatedDelta:
        """Returns the same layer with products that keep a row's bits; see `Linear.steadied`."""
        return replace(
            self,
            channels=self.channels.steadied(),
            gates=self.gates.steadied(),
            output=self.output.steadied(),
        )

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """`[T, H]` to `[T, H]`; writes the rows' inputs to the pool, and states."""
        return self.output(self._read(hidden, context))

    def part(self, hidden: Tensor, context: ForwardContext) -> Tensor | Partials | Part:
        """Returns the result, or what adds up to it; see `Linear.part`."""
        return self.output.part(self._read(hidden, context))

    def _read(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Returns `[T, value_size]`."""
        plan, pool, shape = context.states, context.pool, self.delta
        assert plan is not None
        channels = self.channels(hidden)
        inputs = torch.cat(
            (
                plan.stamps.to(hidden.dtype),
                channels[:, : shape.num_channels],
                self.gates(hidden),
            ),
            dim=1,
        )
        # All rows, before any is read: a sequence's prefix may be in this forward.
        pool.write_rows(self.layer, context.batch.slots, inputs)
        read = self._advance(plan, pool, len(hidden)).to(hidden.dtype)
        normed = self.norm(read.view(-1, shape.value_dim)).view(len(hidden), -1)
        gate = batch_invariant_silu(channels[:, shape.num_channels :])
        return (normed.float() * gate).to(hidden.dtype)

    def _advance(self, plan: StatePlan, pool: KvPool, num_rows: int) -> Tensor:
        """Returns what each row reads, `[T, num_value_heads, value_dim]` float32."""
        assert pool.states is not None
        checkpoints, shape = pool.states.values[self.state], self.delta
        # The last one takes what nobody wants.
        read = checkpoints.new_zeros((num_rows + 1, shape.num_value_heads, shape.value_dim))
        states = checkpoints.index_select(0, plan.loads)
        for block in plan.sequences:
            self._scan(block, states, read, pool)
        checkpoints.index_copy_(0, plan.places, states.index_select(0, plan.kept))
        for group in plan.candidates:
            own = states.index_select(0, group.owners)
            for block in group.blocks:
                self._scan(block, own, read, pool)
        return read[:num_rows]

    def _scan(self, block: StateBlock, states: Tensor, read: Tensor, pool: KvPool) -> None:
        """Advances the states of a block's lanes, and writes what rows read."""
        num_lanes, width = block.is_there.shape
        inputs = pool.read_rows(self.layer, block.slots)[:, STAMP_SIZE:]
        inputs = inputs.reshape(num_lanes, width, -1)
        own = states.index_select(0, block.lanes)
        own, found = delta_scan(inputs, block.is_there, own, self.delta, self.weights)
        states.index_copy_(0, block.lanes, own)
        read.index_copy_(0, block.rows, found.flatten(0, 1))
