"""Keeps the processes of a tensor group in step: rank 0 decides, the others compute along.

What a step is goes through a pipe, a few numbers that wake a follower and that it can wait for as
long as need be; the tensors of a forward, which may be on the device only, follow in one broadcast.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.layers.tensor_group import TensorGroup

# Kernels count on whole vector loads.
_ALIGNMENT = 16


class Pipe(Protocol):
    """One end of a pipe of Python objects, such as `multiprocessing` makes."""

    def send(self, message: Any, /) -> None: ...

    def recv(self) -> Any:
        """Raises: EOFError when the other end is gone."""


class Follower(Protocol):
    """A runner that repeats the forwards of another process, such as `ModelRunner`."""

    @property
    def device(self) -> torch.device: ...

    def run(self, batch: ForwardBatch, *, capture_layers: tuple[int, ...] = ()) -> object: ...

    def move(self, moves: Sequence[tuple[int, int]]) -> object: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is in the broadcast."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward to compute.

    Attributes:
        fields: of the `ForwardBatch`; tensors by their specs, in the order of the broadcast.
    """

    fields: tuple[object, ...]
    capture_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Keys and values to move, from slot to slot: numbers that the host has."""

    moves: tuple[tuple[int, int], ...]


class Leader:
    """Rank 0's side. Every call comes before the work it announces, on the thread that does it."""

    def __init__(self, group: TensorGroup, pipes: Sequence[Pipe]) -> None:
        self._group = group
        self._pipes = pipes

    def forward(self, batch: ForwardBatch, capture_layers: tuple[int, ...]) -> None:
        """Announces `ModelRunner.run`."""
        values = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        tensors = [value for value in values if isinstance(value, Tensor)]
        specs = tuple(spec_of(value) if isinstance(value, Tensor) else value for value in values)
        self.tell(Forward(specs, capture_layers))
        self._group.broadcast(packed(tensors))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Announces `ModelRunner.move`."""
        self.tell(Move(tuple(moves)))

    def tell(self, message: object) -> None:
        """Announces what needs no tensors of the device."""
        for pipe in self._pipes:
            pipe.send(message)


def follow(
    runner: Follower,
    group: TensorGroup,
    pipe: Pipe,
    take_other: Callable[[object], None] | None = None,
) -> None:
    """Computes what rank 0 announces, until its end of the pipe is closed.

    Args:
        take_other: computes what is neither a forward nor a move.
    """
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if isinstance(message, Forward):
            specs = [field for field in message.fields if isinstance(field, TensorSpec)]
            tensors = iter(received(specs, group, runner.device))
            values = [
                next(tensors) if isinstance(field, TensorSpec) else field
                for field in message.fields
            ]
            batch = ForwardBatch(*values)  # type: ignore[arg-type]
            runner.run(batch, capture_layers=message.capture_layers)
        elif isinstance(message, Move):
            runner.move(message.moves)
        else:
            assert take_other is not None, message
            take_other(message)


def spec_of(tensor: Tensor) -> TensorSpec:
    """Returns what the other end of a broadcast has to know of a tensor."""
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of all tensors end to end, each padded to the alignment."""
    device = tensors[0].device
    padding = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=device)
    parts: list[Tensor] = []
    for tensor in tensors:
        # A single element may have any stride and count as contiguous.
        flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
        data = flat.view(torch.uint8)
        parts += [data, padding[: -len(data) % _ALIGNMENT]]
    return torch.cat(parts)


def received(specs: Sequence[TensorSpec], group: TensorGroup, device: torch.device) -> list[Tensor]:
    """Takes in what rank 0 packed and broadcasts."""
    sizes = [spec.size_bytes + -spec.size_bytes % _ALIGNMENT for spec in specs]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    group.broadcast(packed)
    starts = itertools.accumulate(sizes, initial=0)
    return [
        packed[start : start + spec.size_bytes].view(spec.dtype).view(spec.shape)
        for spec, start in zip(specs, starts, strict=False)
    ]
