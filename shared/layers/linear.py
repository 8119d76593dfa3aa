"""A linear layer over a prepared weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from shared.kernels.experts import ExpertWeight
from shared.kernels.linear import LinearWeight, gated_linear, linear, linear_partials
from shared.kernels.pointwise import Partials, silu_mul, total_of
from shared.kernels.quantised import (
    QuantisedWeight,
    StoredMatrix,
    largest_elements,
    quantised_linear,
)
from shared.kv.pool import OwnRows
from shared.layers.tensor_group import Part, TensorGroup
from shared.model_options import Quantisation

STORED_DTYPES = {Quantisation.INT8: torch.int8, Quantisation.FP8: torch.float8_e4m3fn}

_NO_PARTS = frozenset({"counters", "rotary", "sliding_rotary"})
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Linear:
    """`inputs @ weight.T + bias`; build it with `of`, which prepares the weight.

    Attributes:
        group: processes that each hold some columns of the weight and of the inputs; the products
            are added over them. None where the columns are all here.
        cap: bounds the result softly, `cap * tanh(result / cap)`; None in most layers.
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
            quantisation: of a weight that is not in 8 bits already.
        """
        if isinstance(weight, StoredMatrix):
            return cls(QuantisedWeight.kept(weight), bias, group)
        if quantisation is Quantisation.UNQUANT:
            return cls(LinearWeight.prepare(weight), bias, group)
        # The factor of a channel is that of the whole matrix, wherever its columns are.
        largest = None
        if group is not None and not weight.is_meta:
            largest = group.maximum(largest_elements(weight))
        return cls(QuantisedWeight.of(weight, STORED_DTYPES[quantisation], largest), bias, group)

    def dense(self) -> Tensor:
        """Returns the weight as it multiplies, `[N, K]`; a copy where it is packed."""
        if isinstance(self.weight, QuantisedWeight):
            return self.weight.dequantised(self.weight.dtype)
        return self.weight.values.to_dense() if self.weight.is_packed else self.weight.values

    def __call__(self, inputs: Tensor, own: OwnRows | None = None) -> Tensor:
        """`[T, K]` to `[T, N]`; of a group `[R, K]`, where `own` says which rows those are."""
        if self.group is None:
            result = self._product(inputs, self.bias)
        else:
            part = self._product(inputs, None)
            result = self.group.sum(part if own is None else own.placed(part))
            result = result if self.bias is None else result + self.bias
        return result if self.cap is None else (result / self.cap).tanh_().mul_(self.cap)

    def partials(self, inputs: Tensor) -> Tensor | Partials:
        """Returns the product, or its parts where a kernel that reads it can add them."""
        assert self.group is None
        return self(inputs) if self.bias is not None else self._partials(inputs)

    def part(self, inputs: Tensor, own: OwnRows | None = None) -> Tensor | Partials | Part:
        """Returns the product, its parts, or this process's part of it, where the sum can be left
        to others: a bias comes after the sum. Arguments are those of a call."""
        if self.bias is not None:
            return self(inputs, own)
        partials = self._partials(inputs)
        if self.group is None:
            return partials
        if own is not None and own.places is not None:
            partials = own.placed(total_of(partials))
        return Part(partials, self.group)

    def gated(self, inputs: Tensor) -> Tensor:
        """Returns `silu_mul` of the product, `[T, K]` to `[T, N / 2]`."""
        has_more = self.bias is not None or self.group is not None
        if has_more or isinstance(self.weight, QuantisedWeight):
            return silu_mul(self(inputs))
        return gated_linear(inputs, self.weight)

    def _partials(self, inputs: Tensor) -> Tensor | Partials:
        if isinstance(self.weight, QuantisedWeight):
            return quantised_linear(inputs, self.weight, None)
        return linear_partials(inputs, self.weight)

    def _product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self.weight, QuantisedWeight):
            return quantised_linear(inputs, self.weight, bias)
        return linear(inputs, self.weight, bias)


def num_saved_bytes(model: object) -> int:
    """Returns the bytes that the quantised layers of `model`, a tree of dataclasses and tuples,
    take less than unquantised ones would; 0 when none is quantised."""
    weights = (layer.weight for layer in parts_of(model, Linear))
    own = sum(each.num_saved_bytes for each in weights if isinstance(each, QuantisedWeight))
    return own + sum(each.num_saved_bytes for each in parts_of(model, ExpertWeight))


def num_widened_bytes(model: object) -> int:
    """Returns the memory that 8-bit weights of `model` take where products of many rows widen
    them, one after the other."""
    weights = (layer.weight for layer in parts_of(model, Linear))
    own = (each.num_widened_bytes for each in weights if isinstance(each, QuantisedWeight))
    return max(own, default=0)


def steadied(part: _Kind) -> _Kind:
    """Returns a tree of dataclasses and tuples, of which products of experts and of 8-bit weights
    keep a row's bits for every number of rows, as others do anyway."""
    return cast(_Kind, _steadied(part))


def _steadied(part: object) -> object:
    if isinstance(part, QuantisedWeight | ExpertWeight):
        return replace(part, is_batch_invariant=True)
    if isinstance(part, tuple):
        return tuple(map(_steadied, part))
    if not dataclasses.is_dataclass(part) or isinstance(part, TensorGroup | type):
        return part
    fields = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    return replace(part, **{name: _steadied(each) for name, each in fields.items()})


def linears(part: object) -> Iterator[Linear]:
    """Yields every linear layer of a model, a tree of dataclasses and tuples."""
    yield from parts_of(part, Linear)


def parts_of(part: object, kind: type[_Kind]) -> Iterator[_Kind]:
    """Yields every part of a kind of a model, see `named_parts`."""
    return (each for _, each in named_parts(part, kind))


def named_parts(part: object, kind: type[_Kind], name: str = "") -> Iterator[tuple[str, _Kind]]:
    """Yields every part of a kind of a model, a tree of dataclasses and tuples, by its place: but
    tables of positions, scratch memory of products and what a group has."""
    if isinstance(part, kind):
        yield name, part
    elif isinstance(part, tuple):
        for index, each in enumerate(part):
            yield from named_parts(each, kind, f"{name}.{index}")
    elif dataclasses.is_dataclass(part) and not isinstance(part, TensorGroup):
        for field in dataclasses.fields(part):
            if field.name not in _NO_PARTS:
                inner = f"{name}.{field.name}" if name else field.name
                yield from named_parts(getattr(part, field.name), kind, inner)
