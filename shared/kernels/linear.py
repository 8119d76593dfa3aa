"""Products with a constant weight matrix, prepared once for the device they run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKING_ROWS = 8


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight `[N, K]`, packed into oneDNN's blocked layout where that pays.

    Measured for float32 on a CPU without matrix instructions: packed, five rows cost about what
    one costs, and a row has the same bits for every row count and thread count. Unpacked BLAS
    doubles its time from one row to two and changes bits below four rows, which would let
    speculation change a token.

    Attributes:
        values: the plain `[N, K]` tensor, or the opaque packed one.
    """

    values: Tensor
    is_packed: bool

    @classmethod
    def prepare(cls, weight: Tensor) -> LinearWeight:
        """Packs `weight` `[N, K]` if its device and dtype have a packed product."""
        if not _can_pack(weight):
            return cls(weight, is_packed=False)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_ROWS)
        return cls(packed, is_packed=True)


def linear(inputs: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """Returns `inputs @ weight.T + bias`: `[T, K]` to `[T, N]`."""
    if weight.is_packed and inputs.shape[0] > 0:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            inputs, weight.values, bias, "none", [], ""
        )
        return product
    if weight.is_packed:
        return inputs.new_zeros(0, weight.values.shape[0])
    return F.linear(inputs, weight.values, bias)


def _can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn
