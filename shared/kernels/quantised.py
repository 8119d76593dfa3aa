"""Products with a constant weight matrix held in 8 bits.

Each row of the matrix, that is each output channel, has a scale of its own, so that its largest
element takes the whole range; or each block has one, in matrices that come so. Activations are left
alone. A row of a product has the same bits for every number of rows in float32 on the CPU. On GPUs
from Hopper on, in half precision, it has them where 8 bits are widened in registers: for up to 512
rows, or for every number where that is asked for. Of more rows the library makes faster products,
from weights that are widened in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.cache import LARGEST, widened
from shared.kernels.kernel_settings import runs_triton
from shared.kernels.linear import (
    WORD_BLOCK,
    BatchInvariantOperand,
    batch_invariant_linear,
    batch_invariant_product,
    has_batch_invariant_product,
    keeps_row_bits,
    scale_rows,
    tile_counters,
)

_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: LARGEST}
_HALF_PRECISION = (torch.bfloat16, torch.float16)
# Rows at once, whole blocks, which are held in float32 meanwhile.
_MOST_ROUNDED = 64 * WORD_BLOCK
# Rows of the largest product that widens in registers. The largest graphs of decoding and of trees
# have as many, so that only forwards with prompts get the library's bits.
_MOST_REGISTER_ROWS = 512
# About what a piece of a weight takes that is widened at once. Smaller ones stay in the L2 cache,
# and leave multiprocessors idle: a piece has a tile for each 128 of its channels and of the rows.
_PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix `[N, K]` that came in 8 bits.

    Attributes:
        values, scales: see `QuantisedWeight`; values in their own order.
        dtype: of the model.
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
            largest: `[N, 1]` float32, the largest size of an element of each channel, where
                `weight` is only some columns of the matrix.
            block_rows: channels whose 128 columns share a scale; None gives each channel one.
        """
        if block_rows is None:
            largest = largest_elements(weight) if largest is None else largest
            values, scales = _rounded(weight.float(), stored, largest)
            return cls(values, scales, weight.dtype)
        parts = [
            _rounded_blocks(some, stored, block_rows) for some in torch.split(weight, _MOST_ROUNDED)
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
        scales: float32: `[N, 1]`, one a channel; or one for 128 columns of 128 channels,
            `[ceil(N / 128), ceil(K / 128)]`, or of each, `[N, ceil(K / 128)]`.
        counters: see `tile_counters`.
        dtype: of the weight it was made from.
        is_packed: whether `values` are in the order that `in_words` makes.
        is_batch_invariant: a row has the same bits for every number of rows.
    """

    values: Tensor
    scales: Tensor
    counters: Tensor
    dtype: torch.dtype
    is_packed: bool
    is_batch_invariant: bool = False

    @classmethod
    def of(
        cls, weight: Tensor, stored: torch.dtype, largest: Tensor | None = None
    ) -> QuantisedWeight:
        """Rounds `weight` `[N, K]`; see `StoredMatrix.rounded`."""
        return cls.kept(StoredMatrix.rounded(weight, stored, largest))

    @classmethod
    def kept(cls, matrix: StoredMatrix) -> QuantisedWeight:
        """Returns the same numbers, prepared for their device."""
        is_packed = keeps_row_bits(matrix.device, matrix.dtype, matrix.shape[1])
        values = in_words(matrix.values) if is_packed else matrix.values
        counters = tile_counters(len(values), values.device)
        return cls(values, matrix.scales, counters, matrix.dtype, is_packed)

    @property
    def num_saved_bytes(self) -> int:
        """Memory this takes less than the weight it was made from."""
        own = self.values.nbytes + self.scales.nbytes
        return self.values.numel() * self.dtype.itemsize - own

    @property
    def num_widened_bytes(self) -> int:
        """Memory that products of many rows take beside their results."""
        if not self._is_for_library:
            return 0
        return self._piece_channels * self.values.shape[1] * self.dtype.itemsize

    def is_widened(self, num_rows: int) -> bool:
        """Whether a product of so many rows widens the weight in memory."""
        return self._is_for_library and num_rows > _MOST_REGISTER_ROWS

    def pieces(self) -> list[QuantisedWeight]:
        """Returns some channels at a time, whole blocks; none has more than the first."""
        num_channels = self._piece_channels
        num_scales = num_channels // (scale_rows(self.scales, len(self.values)) or 1)
        scales = torch.split(self.scales, num_scales)
        pairs = zip(torch.split(self.values, num_channels), scales, strict=True)
        return [replace(self, values=some, scales=own) for some, own in pairs]

    def widen_into(self, wide: Tensor) -> None:
        """Writes `dequantised` of values in words into `wide` `[N, K]`."""
        if runs_triton(wide):
            # Triton is not installed where there is no CUDA.
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
        """Returns `[N, K]` in `dtype`: also the oracle of the kernel that widens."""
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
    """Returns `[N, 1]` float32, the largest size of an element of each channel."""
    return weight.abs().amax(dim=1, keepdim=True).float()


def _rounded(exact: Tensor, stored: torch.dtype, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values and scales of float32 numbers, of which `largest` broadcasts to theirs."""
    limit = _LIMITS[stored]
    # Zeros alone keep the scale of 1.
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
    """Returns 8-bit `[N, K]` in the order in which a product reads them, four at a time.

    int8: byte b of word j of a block of 128 is element 32 b + j.

    e4m3: the halves of a word are two neighbours that are widened at once, and behind them two from
    the other half of the block. Sign and rest of the former stand where the arithmetic needs
    them, four bits further down than in a bfloat16; those of the latter take the places between.
    Words that a thread multiplies are neighbours as well.
    """
    if values.dtype is torch.int8:
        blocks = values.view(len(values), -1, 4, WORD_BLOCK // 4)
        return blocks.transpose(2, 3).reshape(values.shape)
    # Bits of the element's number in its block to those of the word, the pair and the half.
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

    On a GPU of compute capability 9.0 or above, in half precision, the product reads 8 bits an
    element, if K is a multiple of 128; of many rows, see `QuantisedWeight.is_widened`, it is the
    library's with one piece after the other. Elsewhere the weight is expanded for the time of the
    product, which saves memory and no time.
    """
    if weight.is_packed and inputs.dtype in _HALF_PRECISION:
        if weight.is_widened(len(inputs)):
            return _product_of_pieces(inputs, weight, bias)
        operand = BatchInvariantOperand(weight.values, weight.scales, weight.counters)
        return batch_invariant_linear(inputs, operand, bias)
    expanded = weight.dequantised(inputs.dtype)
    if has_batch_invariant_product(inputs.device, inputs.dtype):
        return batch_invariant_product(inputs, expanded, bias)
    return F.linear(inputs, expanded, bias)


def _product_of_pieces(inputs: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    pieces = weight.pieces()
    num_channels = len(pieces[0].values)
    # The allocator hands layer after layer the same memory, and a stream, or a graph, its own:
    # models of one process may compute at the same time.
    scratch = inputs.new_empty(num_channels, inputs.shape[1])
    results = inputs.new_empty(len(inputs), len(weight.values))
    for index, piece in enumerate(pieces):
        wide = scratch[: len(piece.values)]
        piece.widen_into(wide)
        own = slice(index * num_channels, index * num_channels + len(wide))
        # The library takes a stride between rows of a result: nothing is copied.
        if bias is None:
            torch.mm(inputs, wide.t(), out=results[:, own])
        else:
            torch.addmm(bias[own], inputs, wide.t(), out=results[:, own])
    return results
