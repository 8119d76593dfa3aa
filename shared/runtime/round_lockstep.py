"""Keeps rounds on the device in step in the processes of a tensor group.

Rank 0 has the lanes, the host's view of them, and the trees, whoever drafts them. A follower has
only its part of the target, so a round sends it two tensors, on the stream: the trees with the
slots and pages of their rows, and the tokens that rank 0 drew. Where prompt tokens replace trees,
it sends the trees once more. Nothing is decided twice, so nothing can differ. Through the pipe goes
a word for each round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.layers.tensor_group import TensorGroup
from shared.runtime.lockstep import Leader, TensorSpec, packed, received, spec_of
from shared.runtime.prompt_chunks import PromptChunks
from shared.runtime.round_batches import RoundBatches, RoundShape, RoundTree
from shared.runtime.round_graphs import TreeSource
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState
from shared.speculation.tree import TreeRows


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
    """Rounds of one shape are to come; they replace those that had the key before."""

    key: RoundsKey
    shape: RoundShape
    max_sequences: int


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

    def open(self, shape: RoundShape, max_sequences: int) -> None:
        """Announces a `RoundRunner`."""
        self._leader.tell(OpenRounds(self._key, shape, max_sequences))

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
        shape = self.batches.shape
        tensors = received(_specs(state, shape.num_tree_rows), self.group, state.numbers.device)
        token_ids, parents, depths, visible, batch_tokens, *places = tensors
        positions, slots, kv_lengths, prefix_lengths, page_table = places
        batch = self.batches.fixed(
            token_ids=batch_tokens,
            positions=positions,
            slots=slots,
            kv_lengths=kv_lengths,
            prefix_lengths=prefix_lengths,
            page_table=page_table,
            tail_mask=None if shape.is_chain else visible.flatten(0, 1),
        )
        return RoundTree(TreeRows(token_ids, parents, depths, visible), batch)


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
