"""Keeps passes that grow whole trees in step in the processes of a tensor group.

A pass needs nothing but what the host knows of its sequences, so rank 0 sends that through the
pipe, and a word for each part of the pass. Every rank computes all logits, chooses the same tokens
from them and lays out the next level by itself: no tensor passes between the ranks but the sums and
the logits of the forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.runtime.lockstep import Leader
from shared.runtime.open_sequence import OpenSequence
from shared.runtime.tree_draft import Parts
from shared.tokens import TreeShape


@dataclass(frozen=True, slots=True)
class BeginTrees:
    """See `TreeGrower.begin_parts`.

    Attributes:
        is_split: of the two growers of a model, the one whose passes can stop.
    """

    is_split: bool
    sequences: tuple[OpenSequence, ...]
    tree: TreeShape
    num_choices: int
    is_walk: bool


@dataclass(frozen=True, slots=True)
class QueuePart:
    """The next part of the pass that was begun last."""

    is_split: bool


@dataclass(frozen=True, slots=True)
class CaptureTrees:
    """See `TreeGrower.capture_next`."""

    is_split: bool
    tree: TreeShape
    num_choices: int
    num_sequences: int | None
    is_walk: bool


class TreeLeader:
    """Rank 0's side of one grower. Every call comes before the work it announces."""

    def __init__(self, leader: Leader, *, is_split: bool = False) -> None:
        self._leader, self._is_split = leader, is_split
        self._num_begun = 0

    def split(self) -> TreeLeader:
        """Returns that of the grower's split."""
        return TreeLeader(self._leader, is_split=True)

    def begin(
        self,
        sequences: Sequence[OpenSequence],
        tree: TreeShape,
        num_choices: int,
        *,
        is_walk: bool = False,
    ) -> None:
        self._num_begun += 1
        sent = tuple(map(_sendable, sequences))
        self._leader.tell(BeginTrees(self._is_split, sent, tree, num_choices, is_walk))

    def capture_next(
        self, tree: TreeShape, num_choices: int, num_sequences: int | None, *, is_walk: bool
    ) -> None:
        self._leader.tell(CaptureTrees(self._is_split, tree, num_choices, num_sequences, is_walk))

    def announced(self, parts: Parts) -> Parts:
        """Returns the pass that was begun last, each part of which is announced from now on."""
        message, number = QueuePart(self._is_split), self._num_begun
        while True:
            assert number == self._num_begun, "another pass has taken its place"
            self._leader.tell(message)
            try:
                part = next(parts)
            except StopIteration:
                return
            yield part


def _sendable(sequence: OpenSequence) -> OpenSequence:
    """Returns the same for a pass, without the read-only map of biases, which no pipe takes."""
    assert not sequence.sampling.logit_bias, "a pass takes no bias"
    return replace(sequence, sampling=replace(sequence.sampling, logit_bias={}))
