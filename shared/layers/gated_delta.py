"""Linear attention by the gated delta rule; its inputs are in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.delta_layer import (
    advance_lanes,
    advance_prompts,
    gated_norm,
    store_inputs,
)
from shared.kernels.delta_rule import DeltaShape, DeltaWeights
from shared.kernels.pointwise import Partials
from shared.kv.pool import KvPool
from shared.kv.state_plan import StateInputs
from shared.layers.attention import AttentionShape, ForwardContext
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.tensor_group import Part


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Projections, convolution, recurrence and gated norm of one layer.

    Attributes:
        shape: that of the model's attention layers, whose cache holds this layer's rows too.
        delta: heads of this layer.
        channels: input to `num_channels + value_size`: what is convolved, and the output's gate.
        gates: input to `2 * num_value_heads`: update and decay.
        output: `value_size` back to the hidden size.
        norm: applied to each head of the result.
        layer: the cache's first layer with this layer's rows.
        state: index of this layer in `StateStore.values`.
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

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        return self.output(self._read(hidden, context))

    def part(self, hidden: Tensor, context: ForwardContext) -> Tensor | Partials | Part:
        return self.output.part(self._read(hidden, context))

    def _read(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Writes the rows' inputs to the pool and advances states; returns `[T, value_size]`."""
        inputs, pool, read = context.states, context.pool, context.read
        assert inputs is not None
        assert read is not None
        channels, count = self.channels(hidden), self.delta.num_channels
        slots, stored = context.batch.slots, pool.state_rows(self.layer)
        # Stores all rows before any is read: a sequence's prefix may be in this forward.
        store_inputs(stored, slots, inputs.stamps, channels[:, :count], self.gates(hidden))
        self.advance(inputs, pool, read)
        return gated_norm(read, channels[:, count:], self.norm.weight, self.norm.eps)

    def advance(self, inputs: StateInputs, pool: KvPool, read: Tensor | None = None) -> None:
        """Advances states over stored inputs.

        Args:
            read: see `ForwardContext.read`; None in a plan without rows.
        """
        assert pool.states is not None
        stored, states = pool.state_rows(self.layer), pool.states.values[self.state]
        if read is None:
            read = stored.new_empty((0, self.delta.value_size))
        if inputs.prompts is not None:
            advance_prompts(stored, inputs.prompts, states, read, self.delta, self.weights)
        for lanes in (inputs.sequences, inputs.candidates):
            advance_lanes(stored, lanes, states, read, self.delta, self.weights)
