"""Keeps the processes of a tensor group in step: rank 0 decides, the others compute along.

What a step is goes through a pipe, a few numbers that wake a follower and that it can wait for as
long as need be; the tensors of a forward, which may be on the device only, follow in one broadcast.
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
# Kernels count on whole vector loads.
_ALIGNMENT = 16


class Pipe(Protocol):
    """One end of a pipe of Python objects, such as `multiprocessing` makes."""

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


# Keeps passes that grow whole trees in step in the processes of a tensor group.
#
# A pass needs nothing but what the host knows of its sequences, so rank 0 sends that through the
# pipe, and a word for each part of the pass. Every rank computes all logits, chooses the same
# tokens from them and lays out the next level by itself: no tensor passes between the ranks but
# the sums and the logits of the forwards.


@dataclass(frozen=True, slots=True)
class GrowerCall:
    """What one of the two growers of a model does.

    Attributes:
        is_split: it is the one whose passes can stop.
        method: of `TreeGrower`; None queues the next part of the pass that was begun last.
        args, options: of the method.
    """

    is_split: bool
    method: Callable[..., object] | None = None
    args: tuple[object, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)


class TreeLeader:
    """Rank 0's side of one grower. Every call comes before the work it announces."""

    def __init__(self, leader: Leader, *, is_split: bool = False) -> None:
        self._leader, self._is_split = leader, is_split
        self._num_begun = 0

    def split(self) -> TreeLeader:
        """Returns that of the grower's split."""
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
        """Returns a pass that was begun, each part of which is announced from now on."""
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


# Keeps rounds on the device in step in the processes of a tensor group.
#
# Rank 0 has the lanes, the host's view of them, and the trees, whoever drafts them. A follower has
# only its part of the target, so a round sends it two tensors, on the stream: the trees with the
# slots and pages of their rows, and the tokens that rank 0 drew. Where prompt tokens replace
# trees, it sends the trees once more. Nothing is decided twice, so nothing can differ. Through the
# pipe goes a word for each round.


@dataclass(frozen=True, slots=True)
class RoundsKey:
    """Which rounds of the target are meant.

    Attributes:
        place: of the head, see `RoundSource.place`.
        number: of the shape among those of the head.
    """

    place: int
    number: int


@dataclass(frozen=True, slots=True)
class OpenRounds:
    """Rounds of one shape are to come; they replace those that had the key before.

    Attributes:
        num_pages: columns of the page tables that rank 0 sends.
        features: that rank 0 keeps, without their projection: a stage has to send them.
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
        has_chunks: prompt tokens replace some trees, see `PromptChunks`.
    """

    key: RoundsKey
    num_slots: int
    sampling: RoundSampling
    has_chunks: bool = False


class RoundLeader:
    """Rank 0's side of the rounds of one shape. Every call comes before the work it announces.

    Attributes:
        is_waited_for: something was announced and broke off, so the others wait for ever.
    """

    def __init__(self, leader: Leader, key: RoundsKey) -> None:
        self._leader, self._key = leader, key
        self.is_waited_for = False

    def open(self, sized: SizedShape, num_pages: int, features: FeatureSpec | None) -> None:
        """Announces rounds of a shape, see `OpenRounds`."""
        plain = None if features is None else replace(features, projection=None)
        self._leader.tell(OpenRounds(self._key, sized, num_pages, plain))

    def capturing(self, num_slots: int, sampling: RoundSampling) -> AbstractContextManager[None]:
        """Announces that its body captures the graphs of a round."""
        return self._announced(CaptureRound(self._key, num_slots, sampling))

    def queueing(
        self, num_slots: int, sampling: RoundSampling, *, has_chunks: bool
    ) -> AbstractContextManager[None]:
        """Announces that its body queues a round."""
        return self._announced(QueueRound(self._key, num_slots, sampling, has_chunks))

    @contextmanager
    def _announced(self, message: CaptureRound | QueueRound) -> Iterator[None]:
        self._leader.tell(message)
        self.is_waited_for = True
        yield
        self.is_waited_for = False


@dataclass(frozen=True, slots=True)
class SentTrees:
    """Rank 0's trees, which the others get as soon as they have grown. See `TreeSource`."""

    source: TreeSource
    group: TensorGroup

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """See `TreeSource.grow`."""
        tree = self.source.grow(state, sampling)
        sent = _sent(tree)
        assert [spec_of(each) for each in sent] == _specs(state, tree.rows.token_ids.shape[1])
        self.group.broadcast(packed(sent))
        return tree


@dataclass(frozen=True, slots=True)
class SentChunks:
    """Rank 0's prompt chunks; the others get the trees that they are written over. See
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
    """The trees over which rank 0 wrote prompt chunks, in another process. See `RoundChunks`."""

    group: TensorGroup

    def replace(self, tree: RoundTree, state: RoundState) -> None:
        """Writes what rank 0 has over the trees that it had sent."""
        own = _sent(tree)
        sent = received([spec_of(each) for each in own], self.group, state.numbers.device)
        for each, new in zip(own, sent, strict=True):
            each.copy_(new)

    def accept(self, drawn: Tensor) -> None:
        """Rank 0 sends what is drawn."""


@dataclass(frozen=True, slots=True)
class ReceivedTrees:
    """The trees that rank 0 sends, in another process. See `TreeSource`."""

    batches: RoundBatches
    group: TensorGroup

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """See `TreeSource.grow`; of the state only its size counts."""
        specs = _specs(state, self.batches.shape.num_tree_rows)
        tensors = received(specs, self.group, state.numbers.device)
        return TreeTensors(*tensors[:-1]).laid_out(tensors[-1], self.batches)


def _sent(tree: RoundTree) -> list[Tensor]:
    rows, batch = tree.rows, tree.batch
    wide = [
        each.view_as(rows.token_ids) for each in (batch.token_ids, batch.positions, batch.slots)
    ]
    lengths = [batch.kv_lengths, batch.prefix_lengths, batch.page_table]
    return [rows.token_ids, rows.parents, rows.depths, rows.visible, *wide, *lengths]


def _specs(state: RoundState, num_rows: int) -> list[TensorSpec]:
    """Returns what `_sent` has for the slots of a state."""
    num_slots, num_pages = state.page_table.shape
    wide = TensorSpec(torch.int64, (num_slots, num_rows))
    seen = TensorSpec(torch.bool, (num_slots, num_rows, num_rows))
    length = TensorSpec(torch.int32, (num_slots,))
    pages = TensorSpec(torch.int32, (num_slots, num_pages))
    return [wide, wide, wide, seen, wide, wide, wide, length, length, pages]
