"""Other weights in a draft model that runs.

They are copied into the tensors that are there, so CUDA graphs, and whoever borrowed a head, go on
with the addresses that they know. What the target was told of a head stays: the projection of
features that it applies, and the tokens that the head can draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.errors import CheckpointError

_FIXED = ("feature_spec.projection", "vocabulary.token_ids", "token_map")
# Not learnt: tables of positions, and scratch memory of products.
_NO_WEIGHTS = frozenset({"config", "rotary", "sliding_rotary", "counters"})
_FINITE_PART = 1 << 22  # elements


class Model(Protocol):
    """A tree of dataclasses and tuples with tensors."""

    @property
    def config(self) -> object: ...


class WeightSwap:
    """Weights that were read, checked against the model that runs.

    Args:
        new: of the same config, on the same device; it is of no use afterwards.

    Raises:
        CheckpointError: `new` does not fit, changes what the target was told, or has a weight that
            is not finite; the message names the weight.
    """

    def __init__(self, running: Model, new: Model) -> None:
        if new.config != running.config:
            raise CheckpointError("config.json is not that of the model that runs")
        places, sources = dict(_tensors(running, "")), dict(_tensors(new, ""))
        for name in sorted(places.keys() ^ sources.keys()):
            where = "the model that runs" if name in places else "the new weights"
            raise CheckpointError(f"{name} is in {where} alone")
        for name, place in places.items():
            _check(name, place, sources[name])
        pairs = ((place, sources[name]) for name, place in places.items())
        self._pairs = [(place, source) for place, source in pairs if place is not source]

    @torch.inference_mode()
    def apply(self) -> None:
        """Copies the weights, behind the work that this thread has queued on the device."""
        for place, source in self._pairs:
            place.copy_(source)


def _check(name: str, place: Tensor, source: Tensor) -> None:
    if place is source:
        return
    if source.shape != place.shape or source.dtype != place.dtype:
        raise CheckpointError(
            f"{name} has shape {list(source.shape)} in {source.dtype}; that of the model that runs "
            f"has {list(place.shape)} in {place.dtype}"
        )
    if name in _FIXED and not torch.equal(place, source):
        raise CheckpointError(
            f"{name} differs from that of the model that runs, which a target has"
        )
    plain = source.to_dense() if source.is_mkldnn else source
    if plain.is_floating_point() and not _is_finite(plain):
        raise CheckpointError(f"{name} holds numbers that are not finite")


def _is_finite(values: Tensor) -> bool:
    """In parts: a GPU that serves has little room, and making room would hold up its steps."""
    parts = torch.split(values.reshape(-1), _FINITE_PART)
    return bool(torch.stack([part.float().isfinite().all() for part in parts]).all())


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of nested dataclasses and tuples, by their path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{path}.{index}")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in _NO_WEIGHTS:
                inner = f"{path}.{field.name}" if path else field.name
                yield from _tensors(getattr(value, field.name), inner)
