"""Keeps the ranks of a tensor group in step: rank 0 decides, the followers compute the same.

A pipe carries the description of each step, a few numbers. Followers block on it for any length of
time. The tensors of a forward, which may exist only on the device, follow in one broadcast.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.layers.tensor_group import TensorGroup
from shared.models.heads.feature_spec import FeatureSpec
from shared.runtime.round_batches import (
    PromptChunks,
    RoundBatches,
    RoundTree,
    SizedShape,
    TreeTensors,
)
from shared.runtime.round_graphs import TreeSource
from shared.runtime.round_state import RoundSampling, RoundState
from shared.runtime.tree_draft import Parts

_Params = ParamSpec("_Params")
# Kernels load whole vectors.
_ALIGNMENT = 16


class Pipe(Protocol):
    """One end of a pipe for Python objects, such as `multiprocessing.Pipe` returns."""

    def send(self, message: Any, /) -> None: ...

    def recv(self) -> Any:
        """Raises: EOFError or OSError when the other end is gone."""


class Follower(Protocol):
    """A runner that repeats the forwards of another process, such as `ModelRunner`."""

    @property
    def device(self) -> torch.device: ...

    def run(self, batch: ForwardBatch, *, capture_layers: tuple[int, ...] = ()) -> object: ...

    def move(self, moves: Sequence[tuple[int, int]]) -> object: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor in a broadcast."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward to compute.

    Attributes:
        fields: values of the `ForwardBatch`, with a spec for each tensor, in broadcast order.
    """

    fields: tuple[object, ...]
    capture_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Keys and values to move, as pairs of source slot and target slot."""

    moves: tuple[tuple[int, int], ...]


class Leader:
    """Rank 0's side. Every call precedes the work it announces, on the same thread."""

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
        """Announces work that needs no tensors from the device."""
        for pipe in self._pipes:
            pipe.send(message)


def follow(
    runner: Follower,
    group: TensorGroup,
    pipe: Pipe,
    take_other: Callable[[object], None] | None = None,
) -> None:
    """Computes the work that rank 0 announces, until its end of the pipe is closed.

    Args:
        take_other: handles messages that are neither a forward nor a move.
    """
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        if isinstance(message, Forward):
            specs = [field for field in message.fields if isinstance(field, TensorSpec)]
            tensors = iter(received(specs, group, runner.device))
            values = [
                next(tensors) if isinstance(field, TensorSpec) else field
                for field in message.fields
            ]
            names = (field.name for field in dataclasses.fields(ForwardBatch))
            batch = ForwardBatch(**dict(zip(names, values, strict=True)))  # type: ignore[arg-type]
            runner.run(batch, capture_layers=message.capture_layers)
        elif isinstance(message, Move):
            runner.move(message.moves)
        else:
            assert take_other is not None, message
            take_other(message)


def spec_of(tensor: Tensor) -> TensorSpec:
    """Returns the type and shape that the receiver of a tensor needs."""
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
    """Receives the tensors that rank 0 packed and broadcasts."""
    sizes = [spec.size_bytes + -spec.size_bytes % _ALIGNMENT for spec in specs]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    group.broadcast(packed)
    starts = itertools.accumulate(sizes, initial=0)
    return [
        packed[start : start + spec.size_bytes].view(spec.dtype).view(spec.shape)
        for spec, start in zip(specs, starts, strict=False)
    ]


# Passes that grow whole trees, on all ranks of a tensor group.
#
# A pass needs only host data of its sequences, so rank 0 sends that through the pipe, and a message
# for each part of the pass. Every rank computes all logits, chooses the same tokens from them and
# lays out the next level by itself. Ranks exchange only the sums and the logits of the forwards.


@dataclass(frozen=True, slots=True)
class GrowerCall:
    """A call of one of a model's two growers.

    Attributes:
        is_split: whether it is the grower whose passes can stop.
        method: method of `TreeGrower`; None queues the next part of the pass begun last.
        args, options: arguments of the method.
    """

    is_split: bool
    method: Callable[..., object] | None = None
    args: tuple[object, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)


class TreeLeader:
    """Rank 0's side of one grower. Every call precedes the work it announces."""

    def __init__(self, leader: Leader, *, is_split: bool = False) -> None:
        self._leader, self._is_split = leader, is_split
        self._num_begun = 0

    def split(self) -> TreeLeader:
        """Returns the leader of the grower's `split`."""
        return TreeLeader(self._leader, is_split=True)

    def call(
        self,
        method: Callable[Concatenate[Any, _Params], object],
        *args: _Params.args,
        **options: _Params.kwargs,
    ) -> None:
        """Announces a call of a method of the grower."""
        self._leader.tell(GrowerCall(self._is_split, method, args, options))

    def announced(self, parts: Parts) -> Parts:
        """Wraps a pass that was begun, so that each of its parts is announced."""
        self._num_begun += 1
        return self._announced(parts, self._num_begun)

    def _announced(self, parts: Parts, number: int) -> Parts:
        message = GrowerCall(self._is_split)
        while True:
            assert number == self._num_begun, "another pass has taken its place"
            self._leader.tell(message)
            try:
                part = next(parts)
            except StopIteration:
                return
            yield part


# Rounds on the device, on all ranks of a tensor group.
#
# Rank 0 has the lanes, on host and device, and the trees of any draft. A follower has only its part
# of the target. So each round broadcasts two tensors on the stream: the trees with the slots and
# pages of their rows, and the tokens that rank 0 drew. If prompt tokens replace trees, the trees
# are sent once more. Only rank 0 decides, so ranks cannot differ. The pipe carries one message for
# each round.


@dataclass(frozen=True, slots=True)
class RoundsKey:
    """Names the rounds of one head and one shape.

    Attributes:
        place: index of the head, see `RoundSource.place`.
        number: number of the shape among those of the head.
    """

    place: int
    number: int


@dataclass(frozen=True, slots=True)
class OpenRounds:
    """Opens rounds of one shape, in place of earlier rounds with the same key.

    Attributes:
        num_pages: columns of the page tables that rank 0 sends.
        features: features that rank 0 keeps, unprojected; a pipeline stage has to send them.
    """

    key: RoundsKey
    sized: SizedShape
    num_pages: int
    features: FeatureSpec | None


@dataclass(frozen=True, slots=True)
class CaptureRound:
    """See `RoundRunner.capture`."""

    key: RoundsKey
    num_slots: int
    sampling: RoundSampling


@dataclass(frozen=True, slots=True)
class QueueRound:
    """A round of at least the first `num_slots` slots.

    Attributes:
        has_chunks: whether prompt tokens replace some trees, see `PromptChunks`.
    """

    key: RoundsKey
    num_slots: int
    sampling: RoundSampling
    has_chunks: bool = False


class RoundLeader:
    """Rank 0's side of the rounds of one shape. Every call precedes the work it announces.

    Attributes:
        is_waited_for: whether announced work failed on rank 0, so that the followers wait for ever.
    """

    def __init__(self, leader: Leader, key: RoundsKey) -> None:
        self._leader, self._key = leader, key
        self.is_waited_for = False

    def open(self, sized: SizedShape, num_pages: int, features: FeatureSpec | None) -> None:
        """Announces rounds of a shape, see `OpenRounds`."""
        plain = None if features is None else replace(features, projection=None)
        self._leader.tell(OpenRounds(self._key, sized, num_pages, plain))

    def capturing(self, num_slots: int, sampling: RoundSampling) -> AbstractContextManager[None]:
        """Announces that the body captures the graphs of a round."""
        return self._announced(CaptureRound(self._key, num_slots, sampling))

    def queueing(
        self, num_slots: int, sampling: RoundSampling, *, has_chunks: bool
    ) -> AbstractContextManager[None]:
        """Announces that the body queues a round."""
        return self._announced(QueueRound(self._key, num_slots, sampling, has_chunks))

    @contextmanager
    def _announced(self, message: CaptureRound | QueueRound) -> Iterator[None]:
        self._leader.tell(message)
        self.is_waited_for = True
        yield
        self.is_waited_for = False


@dataclass(frozen=True, slots=True)
class SentTrees:
    """Rank 0's trees, sent to the followers as soon as they have grown. See `TreeSource`."""

    source: TreeSource
    group: TensorGroup

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """See `TreeSource.grow`."""
        tree = self.source.grow(state, sampling)
        sent = _sent(tree)
        assert list(map(spec_of, sent)) == _specs(state, tree.rows.token_ids.shape[1])
        self.group.broadcast(packed(sent))
        return tree


@dataclass(frozen=True, slots=True)
class SentChunks:
    """Rank 0's prompt chunks; sends the trees that they overwrite to the followers. See
    `RoundChunks`."""

    chunks: PromptChunks
    group: TensorGroup

    def replace(self, tree: RoundTree, state: RoundState) -> None:
        """See `PromptChunks.replace`."""
        self.chunks.replace(tree, state)
        self.group.broadcast(packed(_sent(tree)))

    def accept(self, drawn: Tensor) -> None:
        """See `PromptChunks.accept`."""
        self.chunks.accept(drawn)


@dataclass(frozen=True, slots=True)
class ReceivedChunks:
    """A follower's copy of trees overwritten with rank 0's prompt chunks. See `RoundChunks`."""

    group: TensorGroup

    def replace(self, tree: RoundTree, state: RoundState) -> None:
        """Overwrites the trees with those that rank 0 sends."""
        tensors = _sent(tree)
        sent = received([*map(spec_of, tensors)], self.group, state.numbers.device)
        for tensor, new in zip(tensors, sent, strict=True):
            tensor.copy_(new)

    def accept(self, drawn: Tensor) -> None:
        """Does nothing, as rank 0 broadcasts the drawn tokens."""


@dataclass(frozen=True, slots=True)
class ReceivedTrees:
    """The trees that a follower receives from rank 0. See `TreeSource`."""

    batches: RoundBatches
    group: TensorGroup

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """See `TreeSource.grow`; only the size of the state matters."""
        specs = _specs(state, self.batches.shape.num_tree_rows)
        tensors = received(specs, self.group, state.numbers.device)
        return TreeTensors(*tensors[:-1]).laid_out(tensors[-1], self.batches)


def _sent(tree: RoundTree) -> list[Tensor]:
    """Returns the tensors of trees that rank 0 sends."""
    rows, batch = tree.rows, tree.batch
    flat = (batch.token_ids, batch.positions, batch.slots)
    wide = [tensor.view_as(rows.token_ids) for tensor in flat]
    lengths = [batch.kv_lengths, batch.prefix_lengths, batch.page_table]
    return [rows.token_ids, rows.parents, rows.depths, rows.visible, *wide, *lengths]


def _specs(state: RoundState, num_rows: int) -> list[TensorSpec]:
    """Returns the specs of the tensors of `_sent` for the slots of a state."""
    num_slots, num_pages = state.page_table.shape
    wide = TensorSpec(torch.int64, (num_slots, num_rows))
    seen = TensorSpec(torch.bool, (num_slots, num_rows, num_rows))
    length = TensorSpec(torch.int32, (num_slots,))
    pages = TensorSpec(torch.int32, (num_slots, num_pages))
    return [wide, wide, wide, seen, wide, wide, wide, length, length, pages]
