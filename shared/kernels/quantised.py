"""Products with a constant weight matrix in 8 bits.

Each row of the matrix, that is each output channel, has a scale, chosen so that its largest element
uses the whole range. Matrices of some checkpoints have a scale per block instead.

In half precision on Hopper and later GPUs, products are computed in the 8 bits of the weight: rows
of activations are rounded too, see `quantised_rows`. They are batch-invariant: a row has the same
bits for every number of rows. Elsewhere activations are not rounded. Products in float32 on the CPU
are batch-invariant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.cache import LARGEST, widened
from shared.kernels.kernel_settings import dispatched
from shared.kernels.linear import (
    WORD_BLOCK,
    BatchInvariantOperand,
    batch_invariant_product,
    has_batch_invariant_product,
    keeps_row_bits,
    scale_rows,
    tile_counters,
)

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: LARGEST}
# The least that the largest element of rounded activations counts as, so that scales are finite.
SMALLEST = 2.0**-100
_HALF_PRECISION = (torch.bfloat16, torch.float16)
# Rows that are rounded together, a multiple of a block; they are held in float32 meanwhile.
_ROUNDED_ROWS = 64 * WORD_BLOCK


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix `[N, K]` in 8 bits, as a checkpoint stores it.

    Attributes:
        values, scales: see `QuantisedWeight`.
        dtype: dtype of the model.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def rounded(
        cls,
        weight: Tensor,
        stored: torch.dtype,
        largest: Tensor | None = None,
        block_rows: int | None = None,
    ) -> StoredMatrix:
        """Rounds `weight` `[N, K]` to the nearest values that `stored` holds.

        Args:
            largest: `[N, 1]` float32, the largest absolute value of each channel, if `weight` has
                only some columns of the matrix.
            block_rows: number of channels that share a scale for 128 columns; None gives each
                channel one scale.
        """
        if block_rows is None:
            largest = largest_elements(weight) if largest is None else largest
            values, scales = _rounded(weight.float(), stored, largest)
            return cls(values, scales, weight.dtype)
        parts = [
            _rounded_blocks(rows, stored, block_rows) for rows in torch.split(weight, _ROUNDED_ROWS)
        ]
        values, scales = map(torch.cat, zip(*parts, strict=True))
        return cls(values, scales, weight.dtype)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight `[N, K]` that is `values * scales`.

    Attributes:
        values: `[N, K]` int8 or float8_e4m3fn.
        scales: float32; one per channel, `[N, 1]`; or one for 128 columns of 128 channels,
            `[ceil(N / 128), ceil(K / 128)]`, or of one channel, `[N, ceil(K / 128)]`.
        counters: see `tile_counters`.
        dtype: dtype of the original weight.
        has_kernel: whether a kernel computes products in half precision.
    """

    values: Tensor
    scales: Tensor
    counters: Tensor
    dtype: torch.dtype
    has_kernel: bool

    @classmethod
    def of(
        cls, weight: Tensor, stored: torch.dtype, largest: Tensor | None = None
    ) -> QuantisedWeight:
        """Rounds `weight` `[N, K]`; see `StoredMatrix.rounded`."""
        return cls.kept(StoredMatrix.rounded(weight, stored, largest))

    @classmethod
    def kept(cls, matrix: StoredMatrix) -> QuantisedWeight:
        """Prepares a matrix for its device, without changing its numbers."""
        has_kernel = keeps_row_bits(matrix.device, matrix.dtype, matrix.shape[1])
        values = matrix.values.contiguous()
        counters = tile_counters(len(values), values.device)
        return cls(values, matrix.scales, counters, matrix.dtype, has_kernel)

    def operand_for(self, dtype: torch.dtype) -> BatchInvariantOperand | None:
        """See `linear.Weight`."""
        if not self.has_kernel or dtype not in _HALF_PRECISION:
            return None
        return BatchInvariantOperand(self.values, self.scales, self.counters)

    def plain_product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See `linear.Weight`. Dequantises the weight, which saves memory but no time."""
        expanded = self.dequantised(inputs.dtype)
        if has_batch_invariant_product(inputs.device, inputs.dtype):
            return batch_invariant_product(inputs, expanded, bias)
        return F.linear(inputs, expanded, bias)

    @property
    def num_saved_bytes(self) -> int:
        """Memory saved, compared to the original weight."""
        stored_bytes = self.values.nbytes + self.scales.nbytes
        return self.values.numel() * self.dtype.itemsize - stored_bytes

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns `[N, K]` in `dtype`."""
        # Scaled in float32: half precision would overflow on e4m3's largest values times a scale
        # and round twice.
        is_int8 = self.values.dtype is torch.int8
        wide = self.values.to(torch.float32) if is_int8 else widened(self.values)
        rows = scale_rows(self.scales, len(wide))
        if rows == 0:
            return wide.mul_(self.scales).to(dtype)
        grid = self.scales.repeat_interleave(rows, dim=0)[: len(wide)]
        for block, factors in zip(torch.split(wide, WORD_BLOCK, 1), grid.unbind(1), strict=True):
            block.mul_(factors.unsqueeze(1))
        return wide.to(dtype)


def largest_elements(weight: Tensor) -> Tensor:
    """Returns `[N, 1]` float32, the largest absolute value of each channel."""
    return weight.abs().amax(dim=1, keepdim=True).float()


def _rounded(exact: Tensor, stored: torch.dtype, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the values and scales of float32 numbers; `largest` broadcasts to their shape."""
    limit = LIMITS[stored]
    # If all numbers are zero, the scale is 1.
    scales = torch.where(largest > 0.0, largest / limit, 1.0)
    scaled = (exact / scales).clamp_(-limit, limit)
    return (scaled.round_() if stored is torch.int8 else scaled).to(stored), scales


def _rounded_blocks(weight: Tensor, stored: torch.dtype, block_rows: int) -> tuple[Tensor, Tensor]:
    num_rows, depth = weight.shape
    whole = F.pad(weight.float(), (0, -depth % WORD_BLOCK, 0, -num_rows % block_rows))
    blocks = whole.view(-1, block_rows, -(-depth // WORD_BLOCK), WORD_BLOCK)
    values, scales = _rounded(blocks, stored, blocks.abs().amax((1, 3), keepdim=True))
    return values.view_as(whole)[:num_rows, :depth].contiguous(), scales[:, 0, :, 0]


@dispatched("fused_triton")
def quantised_rows(
    rows: Tensor, stored: torch.dtype, *, is_by_block: bool
) -> tuple[Tensor, Tensor]:
    """Rounds rows `[T, K]` of activations to `stored`, int8 or e4m3, with scales that depend on
    nothing but the row.

    Returns:
        `[T, K]` in `stored`, and float32 scales: `[1, T]`, or `[K / 128, T]`, one for 128 columns.
        Those of numbers that are not finite are not finite either.
    """
    size = WORD_BLOCK if is_by_block else rows.shape[1]
    blocks = rows.float().view(len(rows), -1, size)
    largest = blocks.abs().amax(2, keepdim=True)
    # A tensor: torch would divide by a number inexactly on a GPU.
    limits = torch.full_like(largest, LIMITS[stored])
    largest = largest.clamp_min_(SMALLEST)
    values, scales = blocks * (limits / largest), largest / limits
    values = (values.round_() if stored is torch.int8 else values).to(stored)
    return values.flatten(1), scales.squeeze(2).t().contiguous()
