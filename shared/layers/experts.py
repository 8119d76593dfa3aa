"""A feed-forward block of experts, of which each row takes a few."""

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
        is_wide: logits are float32, whatever the dtype of the weight.
    """

    weight: Linear
    correction: Tensor | None
    routing: Routing
    is_wide: bool

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and experts `[T, k]` of `[T, H]`."""
        return route(self._logits(hidden), self.correction, self.routing)

    def _logits(self, hidden: Tensor) -> Tensor | Partials:
        if not self.is_wide:
            return self.weight.partials(hidden)
        assert isinstance(self.weight.weight, LinearWeight)
        assert self.weight.bias is None
        return wide_linear(hidden, self.weight.weight)


@dataclass(frozen=True, slots=True)
class Experts:
    """A gated feed-forward block an expert, weighted by the router, beside one that all rows take.

    Attributes:
        gate_up: of each expert `H` to `2N`, gate first.
        down: of each expert `N` to `H`.
        shared: the block that all rows take; None in some families.
        shared_gate: `H` to 1, whose sigmoid multiplies that block; None in most families.
        group: processes that each hold some channels N of every expert, or some experts, and some
            channels of the shared block.
        scales_inputs: weights multiply what enters an expert, not what leaves it.
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
        """`[T, H]` to `[T, H]`."""
        own = self._own(hidden)
        return own if self.group is None else self.group.sum(own)

    def part(self, hidden: Tensor) -> Tensor | Partials | Part:
        """Returns the result, or what adds up to it; see `Linear.part`."""
        if self.group is not None:
            return Part(self._own(hidden), self.group)
        if self.shared is not None or len(hidden) > MOST_FEW_ROWS or not runs_triton(hidden):
            return self._own(hidden)
        routed = self._routed(hidden)
        assert routed.tiles is not None
        return weighted_parts(routed.gated, routed.weights, self.down, routed.tiles)

    def routes(self, hidden: Tensor) -> Tensor | None:
        """See `FeedForward`."""
        return self.router(hidden)[1]

    def _own(self, hidden: Tensor) -> Tensor:
        """Returns what this process's channels make of `[T, H]`."""
        if self.shared is None:
            routed, shared = self._products(hidden), None
        else:
            own = partial(self._shared, self.shared, hidden)
            routed, shared = side_by_side(
                hidden.device, len(hidden), partial(self._products, hidden), own
            )
        return weighted_sum(*routed, shared)

    def _shared(self, block: Mlp, hidden: Tensor) -> Tensor:
        if self.shared_gate is None:
            return block(hidden)
        return gated(block(hidden), self.shared_gate(hidden))

    def _products(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the pairs `[T * k, H]` of rows with their experts, and their weights."""
        routed = self._routed(hidden)
        pairs = expert_product(routed.gated, routed.experts, self.down, routed.tiles)
        return pairs, routed.weights

    def _routed(self, hidden: Tensor) -> _Routed:
        weights, experts = self.router(hidden)
        if self.group is not None and self.group.spreads_experts:
            experts = self._numbered_here(experts, self.group)
            weights = weights.masked_fill(experts == self.gate_up.num_experts, 0.0)
        tiles = None
        if runs_triton(hidden):
            num_rows = tile_rows(experts.numel(), self.gate_up)
            tiles = tiles_of(experts.flatten(), self.gate_up.num_experts, num_rows)
        inputs = hidden
        if self.scales_inputs:
            inputs = (hidden.unsqueeze(1) * weights.to(hidden.dtype).unsqueeze(2)).flatten(0, 1)
            # What others compute counts nothing here.
            weights = (weights != 0.0).to(weights.dtype)
        if self.limit is None:
            gated = gated_product(inputs, experts, self.gate_up, tiles, self.activation)
        else:
            both = expert_product(inputs, experts, self.gate_up, tiles)
            gated = bounded_gate_mul(both, self.limit)
        return _Routed(weights, experts, tiles, gated)

    def _numbered_here(self, experts: Tensor, group: TensorGroup) -> Tensor:
        """Returns experts by their numbers in this process; those of others have none of them, but
        their count."""
        count = self.gate_up.num_experts
        own = experts - group.rank * count
        return torch.where((own >= 0) & (own < count), own, count)


@dataclass(frozen=True, slots=True)
class _Routed:
    """The experts of each row, and the results of their first products.

    Attributes:
        weights: `[T, k]`.
        experts: `[T, k]`.
        tiles: of the pairs, on devices with kernels; else None.
        gated: `[T * k, N]`.
    """

    weights: Tensor
    experts: Tensor
    tiles: ExpertTiles | None
    gated: Tensor
