"""A linear layer over a prepared weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shared.kernels.experts import ExpertWeight
from shared.kernels.linear import LinearWeight, gated_linear, linear, linear_partials
from shared.kernels.pointwise import Partials, silu_mul, total_of
from shared.kernels.quantised import QuantisedWeight, StoredMatrix, largest_elements
from shared.kv.pool import OwnRows
from shared.layers.tensor_group import Part, TensorGroup
from shared.model_options import Quantisation

STORED_DTYPES = {Quantisation.INT8: torch.int8, Quantisation.FP8: torch.float8_e4m3fn}

_SKIPPED_FIELDS = frozenset({"counters", "rotary", "sliding_rotary"})
_PartT = TypeVar("_PartT")


@dataclass(frozen=True, slots=True)
class Linear:
    """`inputs @ weight.T + bias`; build it with `of`, which prepares the weight.

    Attributes:
        group: processes that each hold some columns of the weight and of the inputs; the products
            are summed over the group. None where this process has all columns.
        cap: soft bound of the result, `cap * tanh(result / cap)`; None in most layers.
    """

    weight: LinearWeight | QuantisedWeight
    bias: Tensor | None
    group: TensorGroup | None = None
    cap: float | None = None

    @classmethod
    def of(
        cls,
        weight: Tensor | StoredMatrix,
        bias: Tensor | None = None,
        quantisation: Quantisation = Quantisation.UNQUANT,
        group: TensorGroup | None = None,
    ) -> Linear:
        """Prepares `weight` `[N, K]` for its device; it may be copied, so drop your reference.

        Args:
            quantisation: applied to a weight that is not in 8 bits already.
        """
        if isinstance(weight, StoredMatrix):
            return cls(QuantisedWeight.kept(weight), bias, group)
        if quantisation is Quantisation.UNQUANT:
            return cls(LinearWeight.prepare(weight), bias, group)
        # A channel has the same scale on all processes: that of all its columns.
        largest = None
        if group is not None and not weight.is_meta:
            largest = group.maximum(largest_elements(weight))
        return cls(QuantisedWeight.of(weight, STORED_DTYPES[quantisation], largest), bias, group)

    def dense(self) -> Tensor:
        """Returns the weight as a dense matrix `[N, K]`; a copy where it is packed or quantised."""
        if isinstance(self.weight, QuantisedWeight):
            return self.weight.dequantised(self.weight.dtype)
        return self.weight.values.to_dense() if self.weight.is_packed else self.weight.values

    def __call__(self, inputs: Tensor, own: OwnRows | None = None) -> Tensor:
        """`[T, K]` to `[T, N]`. In a group with `own`, inputs are the process's rows `[R, K]`."""
        if self.group is None:
            result = linear(inputs, self.weight, self.bias)
        else:
            part = linear(inputs, self.weight, None)
            result = self.group.sum(part if own is None else own.scatter(part))
            result = result if self.bias is None else result + self.bias
        return result if self.cap is None else (result / self.cap).tanh_().mul_(self.cap)

    def partials(self, inputs: Tensor) -> Tensor | Partials:
        """Returns the product, or its parts where a kernel that reads it can add them."""
        assert self.group is None
        return self(inputs) if self.bias is not None else linear_partials(inputs, self.weight)

    def part(self, inputs: Tensor, own: OwnRows | None = None) -> Tensor | Partials | Part:
        """As a call, but may return the product's parts, or this process's part of the sum over the
        group, for the next norm to add. Not with a bias, which comes after the sum."""
        if self.bias is not None:
            return self(inputs, own)
        partials = linear_partials(inputs, self.weight)
        if self.group is None:
            return partials
        if own is not None and own.row_indices is not None:
            partials = own.scatter(total_of(partials))
        return Part(partials, self.group)

    def gated(self, inputs: Tensor) -> Tensor:
        """Returns `silu_mul` of the product, `[T, K]` to `[T, N / 2]`."""
        if self.bias is not None or self.group is not None:
            return silu_mul(self(inputs))
        return gated_linear(inputs, self.weight)


def num_saved_bytes(model: object) -> int:
    """Returns the bytes that quantisation saves in `model`, a tree of dataclasses and tuples; 0
    when no layer is quantised."""
    weights = (layer.weight for layer in parts_of(model, Linear))
    saved = sum(weight.num_saved_bytes for weight in weights if isinstance(weight, QuantisedWeight))
    return saved + sum(weight.num_saved_bytes for weight in parts_of(model, ExpertWeight))


def linears(part: object) -> Iterator[Linear]:
    """Yields every linear layer of a model, a tree of dataclasses and tuples."""
    yield from parts_of(part, Linear)


def parts_of(part: object, kind: type[_PartT]) -> Iterator[_PartT]:
    """Yields every part of type `kind` in a model, see `named_parts`."""
    return (inner for _, inner in named_parts(part, kind))


def named_parts(part: object, kind: type[_PartT], name: str = "") -> Iterator[tuple[str, _PartT]]:
    """Yields every part of type `kind` in a model, a tree of dataclasses and tuples, with its path.
    Skips position tables, scratch memory of products, and groups."""
    if isinstance(part, kind):
        yield name, part
    elif isinstance(part, tuple):
        for index, item in enumerate(part):
            yield from named_parts(item, kind, f"{name}.{index}")
    elif dataclasses.is_dataclass(part) and not isinstance(part, TensorGroup):
        for field in dataclasses.fields(part):
            if field.name not in _SKIPPED_FIELDS:
                path = f"{name}.{field.name}" if name else field.name
                yield from named_parts(getattr(part, field.name), kind, path)
