"""Products of rows with the weights of their experts.

A *pair* is a row and one of its experts: row t and its j-th choice are pair `t * k + j`. On CUDA
one kernel computes all pairs, in tiles of pairs that share an expert; elsewhere there is one
product for each expert's pairs. Either way a pair's bits depend only on its row and its expert, as
far as those of `linear` depend only on the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.kernel_settings import dispatched, has_triton, runs_triton
from shared.kernels.linear import LinearWeight, keeps_row_bits, linear
from shared.kernels.pointwise import Activation, Partials, gate_mul
from shared.kernels.quantised import QuantisedWeight, StoredMatrix

# Rows of a tile: pairs per expert below which the size is used. With few pairs every tile reads a
# whole weight; with many, most tiles are full.
_TILE_ROWS = {16: 8, 32: 24, 64: 96}
_MAX_TILE_ROWS = 128


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """The weights `[E, N, K]` of all experts.

    Attributes:
        experts: one weight per expert, on devices without Triton; else empty.
        values: `[E, N, K]` on devices with Triton; else None.
        scales: scales of 8-bit values, as in `QuantisedWeight` for each expert; else None.
        bias: `[E, N]`; None in most families.
        num_saved_bytes: memory saved, compared to the original weights.
        rounds_rows: 8-bit `values` are multiplied with rows that are rounded to the same type, see
            `quantised.quantised_rows`, if the rows are in half precision.
    """

    experts: tuple[LinearWeight | QuantisedWeight, ...]
    values: Tensor | None
    scales: Tensor | None
    bias: Tensor | None
    num_saved_bytes: int = 0
    rounds_rows: bool = False

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None = None, stored: torch.dtype | None = None
    ) -> ExpertWeight:
        """Prepares `weight` `[E, N, K]` for its device; it may be copied.

        Args:
            stored: int8 or float8_e4m3fn, to which it is rounded; None does not round.
        """
        if stored is None and has_triton(weight.device):
            return cls((), weight, None, bias)
        if stored is None:
            return cls(tuple(map(LinearWeight.prepare, weight)), None, None, bias)
        if not has_triton(weight.device):
            experts = tuple(QuantisedWeight.of(matrix, stored) for matrix in weight)
            num_saved = sum(expert.num_saved_bytes for expert in experts)
            return cls(experts, None, None, bias, num_saved)
        values = weight.new_empty(weight.shape, dtype=stored)
        scales = weight.new_empty((*weight.shape[:2], 1), dtype=torch.float32)
        for index, matrix in enumerate(weight):
            expert = StoredMatrix.rounded(matrix, stored)
            values[index], scales[index] = expert.values, expert.scales
        matrices = values.flatten(0, 1), scales.flatten(0, 1)
        return cls.kept(StoredMatrix(*matrices, weight.dtype), len(weight), bias)

    @classmethod
    def kept(
        cls, matrix: StoredMatrix, num_experts: int, bias: Tensor | None = None
    ) -> ExpertWeight:
        """Prepares the 8-bit matrices of all experts, stacked along the rows of `matrix`, for their
        device. Takes over their memory."""
        values = matrix.values.view(num_experts, -1, matrix.shape[1])
        scales = matrix.scales.view(num_experts, -1, matrix.scales.shape[1])
        wide_bytes = values.numel() * matrix.dtype.itemsize
        num_saved = wide_bytes - values.nbytes - scales.nbytes
        if not has_triton(values.device):
            pairs = zip(values, scales, strict=True)
            experts = (StoredMatrix(*pair, matrix.dtype) for pair in pairs)
            return cls(tuple(map(QuantisedWeight.kept, experts)), None, None, bias, num_saved)
        rounds_rows = keeps_row_bits(values.device, matrix.dtype, values.shape[2])
        return cls((), values, scales, bias, num_saved, rounds_rows=rounds_rows)

    @property
    def num_experts(self) -> int:
        return len(self.experts) if self.values is None else len(self.values)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Pairs in tiles that share an expert.

    Attributes:
        pairs: `[C * R]` int64 for C tiles of R pairs; padded with the number of pairs. None if
            programs find their pairs: program c then computes the tile that pair c begins, if any.
        experts: `[C]` int64; unused tiles have the number of experts.
        num_rows: R.
    """

    pairs: Tensor | None
    experts: Tensor
    num_rows: int


def tiles_of(experts: Tensor, num_experts: int, num_rows: int) -> ExpertTiles:
    """Sorts pairs into tiles, without waiting for the device.

    Args:
        experts: `[P]` int64, the expert of each pair; pairs with expert E, which stands for no
            expert, are left out.
        num_rows: pairs of a tile.
    """
    # Each expert has at most one tile that is not full, and so have the pairs of no expert.
    num_tiles = min(len(experts), num_experts + 1) + len(experts) // num_rows
    if runs_triton(experts):
        from shared.kernels.experts_triton import MOST_FOUND, MOST_PAIRS, laid_tiles

        # With one program per pair, programs can find their pairs, if there are no more of them.
        if len(experts) <= min(num_tiles, MOST_FOUND):
            return ExpertTiles(None, experts, num_rows)
        if len(experts) <= MOST_PAIRS:
            return laid_tiles(experts, num_experts, num_rows, num_tiles)
    return plain_tiles(experts, num_experts, num_rows, num_tiles)


def plain_tiles(experts: Tensor, num_experts: int, num_rows: int, num_tiles: int) -> ExpertTiles:
    """`tiles_of` in plain torch, on any device; the kernel's test oracle."""
    num_pairs, device = len(experts), experts.device
    order = torch.sort(experts, stable=True).indices
    ones = torch.ones_like(experts)
    # Tiles of pairs without an expert come last, like unused tiles.
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
    """Returns the number of rows of a tile."""
    expert_pairs = num_pairs / weight.num_experts
    sizes = (rows for rows, limit in _TILE_ROWS.items() if expert_pairs < limit)
    return next(sizes, _MAX_TILE_ROWS)


@dispatched("experts_triton")
def expert_product(
    inputs: Tensor,
    experts: Tensor,
    weight: ExpertWeight,
    tiles: ExpertTiles | None,  # noqa: ARG001 - kernels read them
) -> Tensor:
    """Returns the product `[P, N]` of every pair with its expert's weight. Without an expert it is
    zero on devices without Triton, and undefined on others.

    Args:
        inputs: `[P, K]`, one per pair, or `[T, K]`, one per row.
        experts: `[T, k]` int64.
        tiles: tiles of the pairs, on devices with Triton; else None.
    """
    num_shared, by_pair = experts.numel() // len(inputs), experts.flatten()
    results: Tensor | None = None
    for expert in sorted({0, *by_pair.tolist()} - {weight.num_experts}):
        pairs = (by_pair == expert).nonzero().squeeze(1)
        rows = inputs.index_select(0, pairs // num_shared)
        bias = None if weight.bias is None else weight.bias[expert]
        product = linear(rows, weight.experts[expert], bias)
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
    """Returns `gate_mul` `[P, N]` of `expert_product`, fused in one kernel; takes its arguments."""
    return gate_mul(expert_product.plain(inputs, experts, weight, tiles), activation)


@dispatched("experts_triton")
def weighted_sum(pairs: Tensor, weights: Tensor, more: Tensor | None = None) -> Tensor:
    """Returns `[T, N]`: for each row the sum of its pairs `[T * k, N]` times their weights
    `[T, k]`, in float32 in the order of its choices. Adds `more` `[T, N]` after rounding."""
    choices = pairs.view(*weights.shape, -1).float()
    total = torch.zeros_like(choices[:, 0])
    for index in range(weights.shape[1]):
        total += choices[:, index] * weights[:, index, None]
    rounded = total.to(pairs.dtype)
    return rounded if more is None else rounded + more


def weighted_parts(
    inputs: Tensor, weights: Tensor, weight: ExpertWeight, tiles: ExpertTiles
) -> Partials:
    """Returns `weighted_sum` of the product of pairs, `inputs` `[P, K]`, as `Partials` that the
    next kernel adds; only on devices with Triton."""
    from shared.kernels.experts_triton import tiled_parts

    return tiled_parts(inputs, weight, tiles, weights)
