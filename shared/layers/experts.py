"""A mixture-of-experts feed-forward block: each row takes a few of the experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shared.kernels.experts import (
    ExpertTiles,
    ExpertWeight,
    expert_product,
    gated_product,
    tile_rows,
    tiles_of,
    weighted_parts,
    weighted_sum,
)
from shared.kernels.kernel_settings import runs_triton
from shared.kernels.launch import side_by_side
from shared.kernels.linear import MOST_FEW_ROWS, LinearWeight, wide_linear
from shared.kernels.pointwise import Activation, Partials, bounded_gate_mul, gated
from shared.kernels.routing import Routing, route
from shared.layers.decoder_layer import Mlp
from shared.layers.linear import Linear
from shared.layers.tensor_group import Part, TensorGroup


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the experts of each row.

    Attributes:
        weight: `H` to E.
        correction: `[E]` float32, see `route`; None in most families.
        is_wide: logits are computed in float32, whatever the dtype of the weight.
    """

    weight: Linear
    correction: Tensor | None
    routing: Routing
    is_wide: bool

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and the experts, `[T, k]` each, of rows `[T, H]`."""
        if not self.is_wide:
            return route(self.weight.partials(hidden), self.correction, self.routing)
        assert isinstance(self.weight.weight, LinearWeight)
        assert self.weight.bias is None
        return route(wide_linear(hidden, self.weight.weight), self.correction, self.routing)


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts, each a gated feed-forward block, weighted by the router, and a shared expert.

    Attributes:
        gate_up: `H` to `2N` for each expert, gate first.
        down: `N` to `H` for each expert.
        shared: the shared expert, which all rows take; None in some families.
        shared_gate: `H` to 1, whose sigmoid multiplies the shared expert; None in most families.
        group: processes that each hold some channels N of every expert, or some experts, and some
            channels of the shared expert.
        scales_inputs: weights multiply an expert's input, not its output.
        limit: see `Mlp`.
    """

    router: Router
    gate_up: ExpertWeight
    down: ExpertWeight
    activation: Activation
    shared: Mlp | None = None
    group: TensorGroup | None = None
    scales_inputs: bool = False
    limit: float | None = None
    shared_gate: Linear | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        part = self._compute(hidden)
        return part if self.group is None else self.group.sum(part)

    def part(self, hidden: Tensor) -> Tensor | Partials | Part:
        if self.group is not None:
            return Part(self._compute(hidden), self.group)
        if self.shared is not None or len(hidden) > MOST_FEW_ROWS or not runs_triton(hidden):
            return self._compute(hidden)
        routed = self._routed(hidden)
        assert routed.tiles is not None
        return weighted_parts(routed.gated, routed.weights, self.down, routed.tiles)

    def routes(self, hidden: Tensor) -> Tensor | None:
        return self.router(hidden)[1]

    def _compute(self, hidden: Tensor) -> Tensor:
        """Returns the result of this process's experts or channels for `[T, H]`."""
        if self.shared is None:
            routed, shared = self._products(hidden), None
        else:
            routed, shared = side_by_side(
                hidden.device,
                len(hidden),
                partial(self._products, hidden),
                partial(self._shared, self.shared, hidden),
            )
        return weighted_sum(*routed, shared)

    def _shared(self, block: Mlp, hidden: Tensor) -> Tensor:
        if self.shared_gate is None:
            return block(hidden)
        return gated(block(hidden), self.shared_gate(hidden))

    def _products(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs `[T * k, H]` of all pairs of a row and its expert, and the pairs'
        weights."""
        routed = self._routed(hidden)
        pairs = expert_product(routed.gated, routed.experts, self.down, routed.tiles)
        return pairs, routed.weights

    def _routed(self, hidden: Tensor) -> _Routed:
        weights, experts = self.router(hidden)
        if self.group is not None and self.group.spreads_experts:
            experts = self._local_experts(experts, self.group)
            weights = weights.masked_fill(experts == self.gate_up.num_experts, 0.0)
        tiles = None
        if runs_triton(hidden):
            num_rows = tile_rows(experts.numel(), self.gate_up)
            tiles = tiles_of(experts.flatten(), self.gate_up.num_experts, num_rows)
        inputs = hidden
        if self.scales_inputs:
            inputs = (hidden.unsqueeze(1) * weights.to(hidden.dtype).unsqueeze(2)).flatten(0, 1)
            # Weights are applied already: 1 for this process's pairs, 0 for those of others.
            weights = (weights != 0.0).to(weights.dtype)
        if self.limit is None:
            gated = gated_product(inputs, experts, self.gate_up, tiles, self.activation)
        else:
            gate_up = expert_product(inputs, experts, self.gate_up, tiles)
            gated = bounded_gate_mul(gate_up, self.limit)
        return _Routed(weights, experts, tiles, gated)

    def _local_experts(self, experts: Tensor, group: TensorGroup) -> Tensor:
        """Returns the experts as indices into this process's experts; experts of other processes
        become the number of experts here."""
        count = self.gate_up.num_experts
        local = experts - group.rank * count
        return torch.where((local >= 0) & (local < count), local, count)


@dataclass(frozen=True, slots=True)
class _Routed:
    """The experts of each row, and the results of their first products.

    Attributes:
        weights: `[T, k]`.
        experts: `[T, k]`.
        tiles: tiles of the pairs, on devices with Triton; else None.
        gated: `[T * k, N]`.
    """

    weights: Tensor
    experts: Tensor
    tiles: ExpertTiles | None
    gated: Tensor
