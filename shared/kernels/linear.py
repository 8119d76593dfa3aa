"""Products with a constant weight matrix, which is prepared once for its device.

On CUDA they are batch-invariant: a row's bits do not depend on the number of rows. Libraries choose
another kernel for another number of rows, with sums in another order. Here the order is the same
for all numbers of rows, in about the library's time: a product leaves the sum of its parts to the
next kernel (`Partials`), or is fused with that kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.pointwise import Partials, silu_mul

# A matrix instruction of a warp group has 64 rows, here channels of the weight.
TILE_CHANNELS = 64
WORD_BLOCK = 128
# Segments are halved up to this many programs that stream the weight, and no shorter than this.
# Constants, whatever the device, because bits depend on them.
_MAX_PROGRAMS = 256
_MIN_SEGMENT = 512
# Tensor cores add products of e4m3 with 14 bits, so long sums lose precision. Over this length they
# lose a fifth more than their rounding to bfloat16, a twentieth of what rounding to e4m3 costs.
# Products of int8 are added exactly, and so many of them, each at most 127 * 128, fit in 32 bits.
MAX_SEGMENT = {torch.float8_e4m3fn: 4096, torch.int8: 2**17}
# The most rows of the kernel for few rows: one tile.
MOST_FEW_ROWS = 64
_HALF_PRECISION = (torch.bfloat16, torch.float16)

_PACKING_ROWS = 8
# Measured for depths from 1,024 on: oneDNN has another kernel for a single row, with other bits.
_MIN_PACKED_ROWS = 2
# oneDNN costs 30 microseconds per product, and a millisecond more for each new number of rows.
_MAX_SMALL_SIZE = 16_384


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a product's depth: all but the last are `length` long."""

    length: int
    count: int

    @classmethod
    def of(cls, depth: int, count: int) -> Segments:
        """Cuts `depth` into at most `count` segments of whole blocks."""
        length = -(-depth // (count * WORD_BLOCK)) * WORD_BLOCK
        return cls(length, -(-depth // length))


@dataclass(frozen=True, slots=True)
class BatchInvariantOperand:
    """The weight of a product, `[N, K]`.

    Attributes:
        values: half precision; or int8 or e4m3, which are multiplied with rows rounded to the same
            type, see `quantised.quantised_rows`.
        scales: scales of 8-bit values, see `QuantisedWeight`; None for half precision.
        counters: see `tile_counters`. Two products that use them must not run at the same time.
    """

    values: Tensor
    scales: Tensor | None
    counters: Tensor

    @property
    def scale_rows(self) -> int:
        """See `scale_rows`; 0 for half precision."""
        return 0 if self.scales is None else scale_rows(self.scales, len(self.values))

    @property
    def segments(self) -> Segments:
        """The segments of K; they depend only on the weight's shape and type."""
        num_channels, depth = self.values.shape
        num_tiles, count = -(-num_channels // TILE_CHANNELS), 1
        while 2 * count * num_tiles <= _MAX_PROGRAMS and 2 * count * _MIN_SEGMENT <= depth:
            count *= 2
        while count * MAX_SEGMENT.get(self.values.dtype, depth) < depth:
            count *= 2
        return Segments.of(depth, count)


def can_be_batch_invariant(weight: Tensor) -> bool:
    """Whether a product with `weight` `[N, K]` in half precision can be batch-invariant.

    It needs the matrix instructions of compute capability 9.0, and K must be a multiple of 128.
    """
    return keeps_row_bits(weight.device, weight.dtype, weight.shape[1])


def keeps_row_bits(device: torch.device, dtype: torch.dtype, depth: int) -> bool:
    """Whether the batch-invariant kernel computes products in `dtype` with a weight of `depth`
    columns, in 16 or 8 bits; see `can_be_batch_invariant`."""
    return is_hopper(device) and dtype in _HALF_PRECISION and depth % WORD_BLOCK == 0


def is_hopper(device: torch.device) -> bool:
    """Whether `device` is a GPU of compute capability 9.0 or above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def scale_rows(scales: Tensor, num_channels: int) -> int:
    """Returns how many channels share a scale of 128 columns; 0 where a channel has one scale.

    Args:
        scales: those of a `QuantisedWeight` or `ExpertWeight`.
    """
    num_rows, num_blocks = scales.shape[-2:]
    if num_rows == num_channels:
        return 0 if num_blocks == 1 else 1
    return WORD_BLOCK


def tile_counters(num_channels: int, device: torch.device) -> Tensor:
    """Returns `[C]` int32 zeros, in which the programs that share a tile count themselves."""
    return torch.zeros(-(-num_channels // TILE_CHANNELS), dtype=torch.int32, device=device)


class Weight(Protocol):
    """A weight `[N, K]` that is prepared for products."""

    def operand_for(self, dtype: torch.dtype) -> BatchInvariantOperand | None:
        """Returns the weight for the batch-invariant CUDA kernels; None if these do not multiply
        inputs in `dtype`."""

    def plain_product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Computes `linear` without these kernels."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight `[N, K]`, packed into oneDNN's blocked layout where that pays.

    Measured for float32 on a CPU without matrix instructions: with a packed weight five rows cost
    about as much as one, and a row has the same bits for any number of rows from two on and any
    number of threads. Unpacked BLAS takes twice the time for two rows and changes bits below four
    rows, so that speculation could change a token. Small weights are multiplied row by row, which
    takes a third of the time.

    Attributes:
        values: the plain `[N, K]` tensor, or the opaque packed one.
        is_small: whether the plain tensor is multiplied row by row.
        counters: see `tile_counters`; None unless the CUDA kernel computes the products.
    """

    values: Tensor
    is_packed: bool
    is_small: bool = False
    counters: Tensor | None = None

    @classmethod
    def prepare(cls, weight: Tensor) -> LinearWeight:
        """Packs `weight` `[N, K]` if its device and dtype have a packed product."""
        if can_be_batch_invariant(weight) and weight.is_contiguous():
            return cls(weight, False, counters=tile_counters(len(weight), weight.device))
        if not has_batch_invariant_product(weight.device, weight.dtype):
            return cls(weight, is_packed=False)
        if _is_small(weight):
            return cls(weight, is_packed=False, is_small=True)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_ROWS)
        return cls(packed, is_packed=True)

    def operand_for(self, dtype: torch.dtype) -> BatchInvariantOperand | None:
        """See `Weight`."""
        if self.counters is None or dtype is not self.values.dtype:
            return None
        return BatchInvariantOperand(self.values, None, self.counters)

    def plain_product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See `Weight`."""
        if self.is_packed or self.is_small:
            return batch_invariant_product(inputs, self.values, bias)
        return F.linear(inputs, self.values, bias)


def linear(inputs: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Returns `inputs @ weight.T + bias`: `[T, K]` to `[T, N]`."""
    operand = weight.operand_for(inputs.dtype)
    if operand is None:
        return weight.plain_product(inputs, bias)
    from shared.kernels.batch_invariant_triton import launch

    return launch(inputs, operand, bias)


def linear_partials(inputs: Tensor, weight: Weight) -> Tensor | Partials:
    """Returns `linear` without a bias, as `Partials` where that is faster."""
    operand = weight.operand_for(inputs.dtype)
    if operand is None:
        return weight.plain_product(inputs, None)
    from shared.kernels.batch_invariant_triton import launch, launch_parts, pays_in_parts

    if pays_in_parts(inputs, operand):
        return launch_parts(inputs, operand)
    return launch(inputs, operand, None)


def gated_linear(inputs: Tensor, weight: Weight) -> Tensor:
    """Returns `silu_mul` of `linear` without a bias, with a fused kernel where that is faster."""
    operand = weight.operand_for(inputs.dtype)
    if operand is None:
        return silu_mul(weight.plain_product(inputs, None))
    from shared.kernels.batch_invariant_triton import launch, launch_gated

    gated = launch_gated(inputs, operand)
    return silu_mul(launch(inputs, operand, None)) if gated is None else gated


def wide_linear(inputs: Tensor, weight: LinearWeight) -> Tensor | Partials:
    """Returns `linear` without a bias in float32, whatever the dtypes; as `Partials` if its kernel
    computes parts."""
    operand = weight.operand_for(inputs.dtype)
    if operand is not None:
        from shared.kernels.batch_invariant_triton import launch_parts

        return replace(launch_parts(inputs, operand), dtype=torch.float32)
    if weight.is_packed or weight.is_small:
        return linear(inputs.float(), weight, None)
    return F.linear(inputs.float(), weight.values.float())


def has_batch_invariant_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `batch_invariant_product` supports tensors of this device and dtype."""
    return device.type == "cpu" and dtype == torch.float32 and torch._C._has_mkldnn


def _is_small(weight: Tensor) -> bool:
    """Whether `batch_invariant_product` multiplies row by row."""
    return weight.layout == torch.strided and weight.numel() <= _MAX_SMALL_SIZE


def batch_invariant_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `inputs @ weight.T + bias`; a row's bits do not depend on the number of rows.

    Args:
        weight: `[N, K]`, plain or packed.
    """
    num_rows = inputs.shape[0]
    if num_rows == 0:
        return inputs.new_zeros(0, weight.shape[0])
    if _is_small(weight):
        rows = torch.bmm(inputs[:, None], weight.t().expand(num_rows, -1, -1))[:, 0]
        return rows if bias is None else rows + bias
    if num_rows < _MIN_PACKED_ROWS:
        inputs = inputs.expand(_MIN_PACKED_ROWS, -1).contiguous()
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        inputs, weight, bias, "none", [], ""
    )
    return product[:num_rows]
