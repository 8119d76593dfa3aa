"""Bytes that a model's linear layers save with weights in 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

from shared.kernels.experts import ExpertWeight
from shared.kernels.quantised import QuantisedWeight
from shared.layers.linear import Linear

_Kind = TypeVar("_Kind")


def num_saved_bytes(model: object) -> int:
    """Returns the bytes that the quantised layers of `model`, a tree of dataclasses and tuples,
    take less than unquantised ones would; 0 when none is quantised."""
    weights = (layer.weight for layer in parts_of(model, Linear))
    own = sum(each.num_saved_bytes for each in weights if isinstance(each, QuantisedWeight))
    return own + sum(each.num_saved_bytes for each in parts_of(model, ExpertWeight))


def linears(part: object) -> Iterator[Linear]:
    """Yields every linear layer of a model, a tree of dataclasses and tuples."""
    yield from parts_of(part, Linear)


def parts_of(part: object, kind: type[_Kind]) -> Iterator[_Kind]:
    """Yields every part of a kind of a model, a tree of dataclasses and tuples."""
    if isinstance(part, kind):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from parts_of(each, kind)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from parts_of(getattr(part, field.name), kind)
