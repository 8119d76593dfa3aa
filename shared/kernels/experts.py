"""Products of rows with the weights of the experts that compute them.

A *pair* is a row and one of its experts: row t and its j-th choice are pair `t * k + j`. On CUDA
one kernel computes all pairs, in tiles of pairs that share an expert; elsewhere each expert's pairs
are a product of their own. Either way a pair's bits depend on its row and its expert alone, as far
as those of `linear` do: on CUDA for tiles of one size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.kernel_settings import dispatched, has_triton, runs_triton
from shared.kernels.linear import LinearWeight, keeps_row_bits, linear
from shared.kernels.pointwise import Activation, Partials, gate_mul
from shared.kernels.quantised import (
    QuantisedWeight,
    StoredMatrix,
    in_words,
    quantised_linear,
)

# Rows of a tile, and the pairs an expert up to which they are taken: of few pairs every tile reads
# a whole weight, and of many most tiles are full.
FEWEST_ROWS = 16
_TILE_ROWS = {FEWEST_ROWS: 8, 32: 24, 64: 96}
_MOST_ROWS = 128


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """The weights `[E, N, K]` of all experts.

    Attributes:
        experts: one an expert, on devices without kernels; else none.
        values: `[E, N, K]` on devices with kernels; else None.
        scales: of values in 8 bits, those of `QuantisedWeight` for each expert; None of others.
        bias: `[E, N]`; None in most families.
        is_packed: whether 8-bit `values` are in the order of `quantised.in_words`.
        num_saved_bytes: memory this takes less than the weights it was made from.
        is_batch_invariant: tiles of one size are taken for any number of pairs.
    """

    experts: tuple[LinearWeight | QuantisedWeight, ...]
    values: Tensor | None
    scales: Tensor | None
    bias: Tensor | None
    num_saved_bytes: int = 0
    is_batch_invariant: bool = False
    is_packed: bool = False

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None = None, stored: torch.dtype | None = None
    ) -> ExpertWeight:
        """Prepares `weight` `[E, N, K]` for its device; it may be copied.

        Args:
            stored: int8 or float8_e4m3fn, which it is rounded to; None leaves it.
        """
        if stored is None and has_triton(weight.device):
            return cls((), weight, None, bias)
        if stored is None:
            return cls(tuple(map(LinearWeight.prepare, weight)), None, None, bias)
        if not has_triton(weight.device):
            experts = tuple(QuantisedWeight.of(each, stored) for each in weight)
            num_saved = sum(each.num_saved_bytes for each in experts)
            return cls(experts, None, None, bias, num_saved)
        values = weight.new_empty(weight.shape, dtype=stored)
        scales = weight.new_empty((*weight.shape[:2], 1), dtype=torch.float32)
        num_saved, is_packed = 0, False
        for index, each in enumerate(weight):
            own = QuantisedWeight.of(each, stored)
            values[index], scales[index] = own.values, own.scales
            num_saved, is_packed = num_saved + own.num_saved_bytes, own.is_packed
        return cls((), values, scales, bias, num_saved, is_packed=is_packed)

    @classmethod
    def kept(
        cls, matrix: StoredMatrix, num_experts: int, bias: Tensor | None = None
    ) -> ExpertWeight:
        """Prepares the matrices of all experts, which came in 8 bits below one another, for their
        device. Their memory is this weight's from now on."""
        values = matrix.values.view(num_experts, -1, matrix.shape[1])
        scales = matrix.scales.view(num_experts, -1, matrix.scales.shape[1])
        wide_bytes = values.numel() * matrix.dtype.itemsize
        num_saved = wide_bytes - values.nbytes - scales.nbytes
        if not has_triton(values.device):
            each = (StoredMatrix(*own, matrix.dtype) for own in zip(values, scales, strict=True))
            return cls(tuple(map(QuantisedWeight.kept, each)), None, None, bias, num_saved)
        is_packed = keeps_row_bits(values.device, matrix.dtype, values.shape[2])
        if is_packed:
            # In place: a layer of them may be as large as what is left of the device.
            for own_values in values:
                own_values.copy_(in_words(own_values))
        return cls((), values, scales, bias, num_saved, is_packed=is_packed)

    @property
    def num_experts(self) -> int:
        return len(self.experts) if self.values is None else len(self.values)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Pairs in tiles that share an expert.

    Attributes:
        pairs: `[C * R]` int64 for C tiles of R; padding is the number of pairs. None where the
            programs of a product find their pairs themselves: pair c, if it begins a tile.
        experts: `[C]` int64; tiles that are not needed have the number of experts.
        num_rows: R.
    """

    pairs: Tensor | None
    experts: Tensor
    num_rows: int


def tiles_of(experts: Tensor, num_experts: int, num_rows: int) -> ExpertTiles:
    """Sorts pairs into tiles, without waiting for the device.

    Args:
        experts: `[P]` int64, the expert of each pair; pairs of expert E, which is none, are
            left out.
        num_rows: of a tile.
    """
    # An expert leaves at most one tile that is not full, and so does none.
    num_tiles = min(len(experts), num_experts + 1) + len(experts) // num_rows
    if runs_triton(experts):
        from shared.kernels.experts_triton import MOST_FOUND, MOST_PAIRS, laid_tiles

        # A program a pair finds its own, where that makes no more programs.
        if len(experts) <= min(num_tiles, MOST_FOUND):
            return ExpertTiles(None, experts, num_rows)
        if len(experts) <= MOST_PAIRS:
            return laid_tiles(experts, num_experts, num_rows, num_tiles)
    return plain_tiles(experts, num_experts, num_rows, num_tiles)


def plain_tiles(experts: Tensor, num_experts: int, num_rows: int, num_tiles: int) -> ExpertTiles:
    """`tiles_of` in plain torch, on any device: the kernel's oracle."""
    num_pairs, device = len(experts), experts.device
    order = torch.sort(experts, stable=True).indices
    ones = torch.ones_like(experts)
    # Tiles of no expert come last, as those that are not needed.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(
        0, experts, ones
    )
    tile_counts = (counts + (num_rows - 1)) // num_rows
    tile_ends = tile_counts.cumsum(0)
    first_places = (tile_ends - tile_counts) * num_rows - (counts.cumsum(0) - counts)
    sorted_experts = experts.index_select(0, order)
    places = first_places.index_select(0, sorted_experts)
    places = places + torch.arange(num_pairs, device=device)
    pairs = torch.full((num_tiles * num_rows,), num_pairs, dtype=torch.int64, device=device)
    pairs.index_copy_(0, places, order)
    tile_indices = torch.arange(num_tiles, device=device)
    tile_experts = torch.searchsorted(tile_ends, tile_indices, right=True)
    return ExpertTiles(pairs, tile_experts.clamp_(max=num_experts), num_rows)


def tile_rows(num_pairs: int, weight: ExpertWeight) -> int:
    """Returns how many rows a tile takes."""
    if weight.is_batch_invariant:
        return FEWEST_ROWS
    pairs_each = num_pairs / weight.num_experts
    return next((rows for rows, most in _TILE_ROWS.items() if pairs_each < most), _MOST_ROWS)


@dispatched("experts_triton")
def expert_product(
    inputs: Tensor,
    experts: Tensor,
    weight: ExpertWeight,
    tiles: ExpertTiles | None,  # noqa: ARG001 - kernels read them
) -> Tensor:
    """Returns the product `[P, N]` of every pair with its expert's weight; on devices without
    kernels zeros for pairs of no expert.

    Args:
        inputs: `[P, K]`, one a pair, or `[T, K]`, one a row.
        experts: `[T, k]` int64.
        tiles: those of the pairs, on devices with kernels; else None.
    """
    num_shared, by_pair = experts.numel() // len(inputs), experts.flatten()
    results: Tensor | None = None
    for expert in sorted({0, *by_pair.tolist()} - {weight.num_experts}):
        pairs = (by_pair == expert).nonzero().squeeze(1)
        rows = inputs.index_select(0, pairs // num_shared)
        bias = None if weight.bias is None else weight.bias[expert]
        own = weight.experts[expert]
        if isinstance(own, QuantisedWeight):
            product = quantised_linear(rows, own, bias)
        else:
            product = linear(rows, own, bias)
        if results is None:
            results = product.new_zeros(len(by_pair), product.shape[1])
        results.index_copy_(0, pairs, product)
    assert results is not None, "a forward has at least one row"
    return results


@dispatched("experts_triton")
def gated_product(
    inputs: Tensor,
    experts: Tensor,
    weight: ExpertWeight,
    tiles: ExpertTiles | None,
    activation: Activation,
) -> Tensor:
    """Returns `gate_mul` `[P, N]` of `expert_product`, whose arguments it takes, by one kernel."""
    return gate_mul(expert_product.plain(inputs, experts, weight, tiles), activation)


@dispatched("experts_triton")
def weighted_sum(pairs: Tensor, weights: Tensor, more: Tensor | None = None) -> Tensor:
    """Returns `[T, N]`: the pairs `[T * k, N]` of each row times its weights `[T, k]`, added in
    float32 in the order of its choices, rounded, and `more` `[T, N]` after that."""
    choices = pairs.view(*weights.shape, -1).float()
    total = torch.zeros_like(choices[:, 0])
    for index in range(weights.shape[1]):
        total += choices[:, index] * weights[:, index, None]
    rounded = total.to(pairs.dtype)
    return rounded if more is None else rounded + more


def weighted_parts(
    inputs: Tensor, weights: Tensor, weight: ExpertWeight, tiles: ExpertTiles
) -> Partials:
    """Returns `weighted_sum` of the product of pairs, `inputs` `[P, K]`, in parts to be added by
    the kernel after it, on devices with kernels."""
    from shared.kernels.experts_triton import tiled_parts

    return tiled_parts(inputs, weight, tiles, weights)
