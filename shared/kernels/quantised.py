"""Products with a constant weight matrix in 8 bits.

Each row of the matrix, that is each output channel, has a scale, chosen so that its largest element
uses the whole range. Matrices of some checkpoints have a scale per block instead.

In half precision on Hopper and later GPUs, products with e4m3 are computed in e4m3: rows of
activations are rounded too, see `quantised_rows`. They are batch-invariant: a row has the same bits
for every number of rows. Elsewhere, and with int8, activations are not rounded. Products with int8
are batch-invariant as long as the kernel widens the 8 bits in registers: for up to 512 rows, or for
all numbers of rows on request. For more rows the library's products are faster, with weights
widened in memory. Products in float32 on the CPU are batch-invariant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.cache import LARGEST, widened
from shared.kernels.kernel_settings import dispatched, runs_triton
from shared.kernels.linear import (
    WORD_BLOCK,
    BatchInvariantOperand,
    batch_invariant_linear,
    batch_invariant_product,
    gated_product,
    has_batch_invariant_product,
    keeps_row_bits,
    parts_of_product,
    scale_rows,
    tile_counters,
)
from shared.kernels.pointwise import Partials, silu_mul

_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: LARGEST}
# The least that the largest element of rounded activations counts as, so that scales are finite.
SMALLEST = 2.0**-100
_HALF_PRECISION = (torch.bfloat16, torch.float16)
# Rows that are rounded together, a multiple of a block; they are held in float32 meanwhile.
_ROUNDED_ROWS = 64 * WORD_BLOCK
# The most rows of a product that widens in registers. The largest graphs of decode steps and trees
# have as many rows, so that only forwards with prompts have the library's bits.
_MAX_REGISTER_ROWS = 512
# About the size of the pieces in which a weight is widened. Smaller pieces would stay in the L2
# cache, but leave multiprocessors idle: there is one tile per 128 channels of a piece and 128 rows.
_PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix `[N, K]` in 8 bits, as a checkpoint stores it.

    Attributes:
        values, scales: see `QuantisedWeight`; the values are not packed.
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
        has_kernel: whether a kernel computes products in half precision; `values` of int8 are in
            the order of `in_words` then.
        is_batch_invariant: a row has the same bits for every number of rows.
    """

    values: Tensor
    scales: Tensor
    counters: Tensor
    dtype: torch.dtype
    has_kernel: bool
    is_batch_invariant: bool = False

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
        is_packed = has_kernel and matrix.values.dtype is torch.int8
        values = in_words(matrix.values) if is_packed else matrix.values.contiguous()
        counters = tile_counters(len(values), values.device)
        return cls(values, matrix.scales, counters, matrix.dtype, has_kernel)

    def operand_for(self, dtype: torch.dtype) -> BatchInvariantOperand | None:
        """Returns the weight for the kernel; None if that does not multiply inputs in `dtype`."""
        if not self.has_kernel or dtype not in _HALF_PRECISION:
            return None
        return BatchInvariantOperand(self.values, self.scales, self.counters)

    @property
    def is_packed(self) -> bool:
        """Whether `values` are in the order of `in_words`."""
        return self.has_kernel and self.values.dtype is torch.int8

    @property
    def num_saved_bytes(self) -> int:
        """Memory saved, compared to the original weight."""
        stored_bytes = self.values.nbytes + self.scales.nbytes
        return self.values.numel() * self.dtype.itemsize - stored_bytes

    @property
    def num_widened_bytes(self) -> int:
        """Scratch memory of products with many rows."""
        if not self._is_for_library:
            return 0
        return self._piece_channels * self.values.shape[1] * self.dtype.itemsize

    def is_widened(self, num_rows: int) -> bool:
        """Whether a product of `num_rows` widens the weight in memory."""
        return self._is_for_library and num_rows > _MAX_REGISTER_ROWS

    def pieces(self) -> list[QuantisedWeight]:
        """Returns the weight in pieces of whole blocks of channels; the last one may be smaller."""
        num_channels = self._piece_channels
        num_scales = num_channels // (scale_rows(self.scales, len(self.values)) or 1)
        scales = torch.split(self.scales, num_scales)
        pairs = zip(torch.split(self.values, num_channels), scales, strict=True)
        return [replace(self, values=values, scales=scale) for values, scale in pairs]

    def widen_into(self, wide: Tensor) -> None:
        """Writes `dequantised` of values in words into `wide` `[N, K]`."""
        if runs_triton(wide):
            from shared.kernels.widening_triton import launch_widening

            launch_widening(self.values, self.scales, wide)
        else:
            wide.copy_(self.dequantised(wide.dtype))

    @property
    def _is_for_library(self) -> bool:
        return self.is_packed and not self.is_batch_invariant

    @property
    def _piece_channels(self) -> int:
        num_channels, depth = self.values.shape
        num_pieces = -(-num_channels * depth * self.dtype.itemsize // _PIECE_BYTES)
        return -(-num_channels // (num_pieces * WORD_BLOCK)) * WORD_BLOCK

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns `[N, K]` in `dtype`; also the test oracle of the widening kernel."""
        # Scaled in float32: half precision would overflow on e4m3's largest values times a scale
        # and round twice.
        values = from_words(self.values) if self.is_packed else self.values
        is_int8 = values.dtype is torch.int8
        wide = values.to(torch.float32) if is_int8 else widened(values)
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
    limit = _LIMITS[stored]
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


def in_words(values: Tensor) -> Tensor:
    """Returns 8-bit `[N, K]` packed in the order in which a product reads them, words of four.

    int8: byte b of word j of a block of 128 is element 32 b + j.

    e4m3: a 16-bit half of a word holds two elements. The first elements of both halves are
    neighbours, widened together; the second ones are neighbours in the other half of the block.
    Sign and other bits of a first element are where the arithmetic needs them, four bits lower than
    in a bfloat16; those of the second are in the bits between. Words of one thread are neighbours.
    """
    if values.dtype is torch.int8:
        blocks = values.view(len(values), -1, 4, WORD_BLOCK // 4)
        return blocks.transpose(2, 3).reshape(values.shape)
    # Permutes the bits of an element's index in its block to those of word, pair and half.
    codes = values.view(torch.uint8).view(len(values), -1, 2, 2, 4, 2, 2, 2)
    first, second = codes.permute(0, 1, 5, 3, 6, 4, 7, 2).short().unbind(-1)
    halves = (first & 0x80) << 8 | (first & 0x7F) << 4
    halves |= (second & 0x80) << 4 | (second & 0x70) << 8 | second & 0x0F
    return halves.contiguous().view(torch.uint8).view(values.shape).view(values.dtype)


def from_words(values: Tensor) -> Tensor:
    """The inverse of `in_words`."""
    if values.dtype is torch.int8:
        blocks = values.view(len(values), -1, WORD_BLOCK // 4, 4)
        return blocks.transpose(2, 3).reshape(values.shape)
    halves = values.view(torch.int16)
    first = halves >> 8 & 0x80 | halves >> 4 & 0x7F
    second = halves >> 4 & 0x80 | halves >> 8 & 0x70 | halves & 0x0F
    words = torch.stack((first, second), -1).to(torch.uint8)
    words = words.view(len(values), -1, 2, 2, 2, 4, 2, 2)
    codes = words.permute(0, 1, 7, 3, 5, 2, 4, 6)
    return codes.reshape(values.shape).view(values.dtype)


def quantised_linear(inputs: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """Returns `inputs @ weight.T + bias`: `[T, K]` to `[T, N]`.

    On a GPU of compute capability 9.0 or above, in half precision, the product reads 8 bits per
    element, if K is a multiple of 128. For many rows with int8, see `QuantisedWeight.is_widened`,
    the library multiplies one widened piece after another. Elsewhere the weight is dequantised for
    each product, which saves memory but no time.
    """
    operand = weight.operand_for(inputs.dtype)
    if operand is not None:
        if weight.is_widened(len(inputs)):
            return _product_of_pieces(inputs, weight, bias)
        return batch_invariant_linear(inputs, operand, bias)
    expanded = weight.dequantised(inputs.dtype)
    if has_batch_invariant_product(inputs.device, inputs.dtype):
        return batch_invariant_product(inputs, expanded, bias)
    return F.linear(inputs, expanded, bias)


def quantised_partials(inputs: Tensor, weight: QuantisedWeight) -> Tensor | Partials:
    """Returns `quantised_linear` without a bias, as `Partials` where that is faster."""
    parts = parts_of_product(inputs, weight.operand_for(inputs.dtype))
    return quantised_linear(inputs, weight, None) if parts is None else parts


def quantised_gated(inputs: Tensor, weight: QuantisedWeight) -> Tensor:
    """Returns `silu_mul` of `quantised_linear` without a bias, with a fused kernel if there is
    one."""
    gated = gated_product(inputs, weight.operand_for(inputs.dtype))
    return silu_mul(quantised_linear(inputs, weight, None)) if gated is None else gated


@dispatched("fused_triton")
def quantised_rows(rows: Tensor, *, is_by_block: bool) -> tuple[Tensor, Tensor]:
    """Rounds rows `[T, K]` of activations to e4m3, with scales that depend on nothing but the row.

    Returns:
        `[T, K]` e4m3, and float32 scales: `[1, T]`, or `[K / 128, T]`, one for 128 columns.
    """
    size = WORD_BLOCK if is_by_block else rows.shape[1]
    blocks = rows.float().view(len(rows), -1, size)
    largest = blocks.abs().amax(2, keepdim=True)
    # A tensor: torch would divide by a number inexactly on a GPU.
    limits = torch.full_like(largest, LARGEST)
    largest = largest.clamp_min_(SMALLEST)
    values, scales = (blocks * (limits / largest)).to(torch.float8_e4m3fn), largest / limits
    return values.flatten(1), scales.squeeze(2).t().contiguous()


def _product_of_pieces(inputs: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    pieces = weight.pieces()
    num_channels = len(pieces[0].values)
    # Not kept between calls: the allocator gives all layers the same memory, but each stream and
    # graph its own, so that two models of a process can compute at the same time.
    scratch = inputs.new_empty(num_channels, inputs.shape[1])
    results = inputs.new_empty(len(inputs), len(weight.values))
    for index, piece in enumerate(pieces):
        wide = scratch[: len(piece.values)]
        piece.widen_into(wide)
        channels = slice(index * num_channels, index * num_channels + len(wide))
        # The library supports a stride between a result's rows, so nothing is copied.
        if bias is None:
            torch.mm(inputs, wide.t(), out=results[:, channels])
        else:
            torch.addmm(bias[channels], inputs, wide.t(), out=results[:, channels])
    return results
