"""What the linear layers of a model save by holding their weights in 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shared.kernels.quantised import QuantisedWeight
from shared.layers.linear import Linear


def num_saved_bytes(model: object) -> int:
    """Returns the bytes that the quantised layers of `model`, a tree of dataclasses and tuples,
    take less than unquantised ones would; 0 when none is quantised."""
    weights = (layer.weight for layer in linears(model))
    return sum(each.num_saved_bytes for each in weights if isinstance(each, QuantisedWeight))


def linears(part: object) -> Iterator[Linear]:
    """Yields every linear layer of a model, a tree of dataclasses and tuples."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from linears(each)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from linears(getattr(part, field.name))
