"""Sequences whose rounds stay on the device: draft, verification and commit without the host.

A draft in the target's process may lend its head, see `round_source.py`. Then, while every running
sequence is such that a round needs nothing of the host, the loop launches round after round and
reads each one late. Whatever does not fit, a prompt, a grammar, log probabilities, sends all of
them back to the general path, which computes the same tokens, and they return when it is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from services.target.control.round_times import RoundSize
from services.target.drafts.feature_store import FeatureStore
from services.target.rounds.guest import Guest
from services.target.rounds.round_requests import can_be_round
from services.target.rounds.round_runners import RoundRunners
from services.target.rounds.round_source import RoundSource
from services.target.sequence import Sequence as TargetSequence
from shared.kv.leases import KvLeases
from shared.kv.pages import PagePool
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_sequences import Newcomer, SequenceRound
from shared.runtime.runner import ModelRunner
from shared.runtime.shortage import Shortage
from shared.tokens import TreeShape

logger = logging.getLogger(__name__)
MIN_SPARSE = 16
"""Slots below which empty ones cost next to nothing."""


class DeviceRounds:
    """Owned by the engine thread.

    Args:
        store: the features that the head reads, one row a slot of the target's pool.
        algorithm: the name of what the head does.

    Attributes:
        is_pinned: an operator fixed the shape.
    """

    def __init__(
        self,
        source: RoundSource,
        runner: ModelRunner,
        leases: KvLeases,
        store: FeatureStore,
        algorithm: str,
    ) -> None:
        self.store = store
        self.is_pinned = source.is_pinned
        self._algorithm = algorithm
        self._leases = leases
        self._cache = runner.cache
        self._head_pages = PagePool.of(source.pages)
        self._max_context_tokens = source.max_context_tokens
        self._runners = RoundRunners(source, runner, store.rows)
        self._guests: dict[int, Guest] = {}
        self._refused: set[int] = set()

    @property
    def shape(self) -> TreeShape:
        """Of the trees that rounds have now."""
        return self._runners.shape

    def shapes_for(self, num_sequences: int) -> tuple[TreeShape, ...]:
        """Returns the shapes that take so many sequences, the draft's own first."""
        return self._runners.shapes_for(num_sequences)

    def size_of(self, sequences: Sequence[TargetSequence]) -> RoundSize:
        """Returns the size of a round of these sequences, who take part or begin together."""
        kind = RoundSampling.of(each.sampling for each in sequences)
        num_slots = self._runner.num_slots or len(sequences)
        return RoundSize(self._runners.num_computed(num_slots), kind.value)

    @property
    def is_sparse(self) -> bool:
        """Whether so many have left that it pays to place those that are there anew."""
        used = self._runners.num_computed(self._runner.num_slots)
        needed = self._runners.num_computed(len(self._runner.sequence_ids))
        return used >= MIN_SPARSE and used >= 2 * needed

    @property
    def awaited_size(self) -> RoundSize:
        """Of the oldest unread round."""
        num_slots, kind = self._runner.awaited_size
        return RoundSize(self._runners.num_computed(num_slots), kind.value)

    @property
    def num_captured(self) -> int:
        """Graphs so far; a launch that needs new ones takes long."""
        return self._runners.num_captured

    def prepare_next(self) -> bool:
        """Captures graphs that a later round would; returns whether any were left."""
        return self._runners.capture_next()

    def turn_to(self, shape: TreeShape) -> None:
        """Gives the rounds from now on trees of another shape; every round has been read."""
        if shape != self.shape:
            self.leave()
            self._runners.turn_to(shape)

    @property
    def _runner(self) -> RoundRunner:
        return self._runners.current

    @property
    def is_running(self) -> bool:
        """Whether sequences take part, or results wait to be read."""
        return bool(self._runner.sequence_ids) or self._runner.num_pending > 0

    def takes(self, sequence: TargetSequence) -> bool:
        """Whether rounds can do all that the request asks for, and its context is not too long."""
        return (
            can_be_round(sequence.request, self._algorithm, self._runners.max_tree_rows)
            and len(sequence.token_ids) <= self._max_context_tokens
            and sequence.sequence_id not in self._refused
        )

    def takes_all(self, sequences: Sequence[TargetSequence]) -> bool:
        """Whether rounds can do all that these ask for, and are not too narrow for them."""
        return len(sequences) <= self._runners.max_sequences and all(map(self.takes, sequences))

    def suits(self, sequences: Sequence[TargetSequence]) -> bool:
        """Whether the next step of all running sequences can be a round, once the host has read
        those before it."""
        return (
            bool(sequences)
            and self.takes_all(sequences)
            and all(each.num_uncomputed == 1 and each.num_computed > 0 for each in sequences)
        )

    def launch(self, sequences: Sequence[TargetSequence]) -> bool:
        """Launches a round of all running sequences, those that are new to it included. Their last
        tokens are read, and all before them are computed.

        False, with nothing launched, when pages, features or memory are missing; the sequences
        that lack them are refused from then on.
        """
        if not all(map(self._has_room, sequences)):
            return False
        try:
            self._place(sequences)
            self._runner.launch()
        except RuntimeError as error:
            # What the head has to catch up with, or graphs of this size, do not fit beside weights
            # and cache; fewer sequences may.
            self._give_up(Shortage.of(error))
            return False
        return True

    def _give_up(self, shortage: Shortage) -> None:
        """No memory for the sequences that take part: other shapes may have some for them."""
        if self._runners.are_several:
            self._runners.confine(len(self._runner.sequence_ids), shortage)
            return
        logger.warning(
            "no memory for rounds of %d sequences: %s",
            *(len(self._runner.sequence_ids), self._cache.advice(shortage)),
        )
        self._refused |= self._runner.sequence_ids

    @property
    def num_pending(self) -> int:
        """Rounds that are launched and not read."""
        return self._runner.num_pending

    @property
    def num_guests(self) -> int:
        """Sequences of the oldest unread round, those that have ended since included."""
        return self._runner.num_awaited

    @property
    def num_tree_rows(self) -> int:
        """Rows that the target computes for a sequence."""
        return self._runner.shape.num_tree_rows

    def read(self) -> list[tuple[TargetSequence, SequenceRound]]:
        """Waits for the oldest unread round; returns what it did to sequences still running."""
        found: list[tuple[TargetSequence, SequenceRound]] = []
        slots: list[int] = []
        for each in self._runner.result():
            guest = self._guests.get(each.sequence_id)
            if guest is None:
                continue
            # The round began with computing every row that was open.
            guest.num_head_rows = start = len(guest.sequence.token_ids) - 1
            end = start + len(each.token_ids)
            slots += guest.sequence.open_lease.slots(start, end, self._leases.page_size)
            found.append((guest.sequence, each))
        self.store.know(slots)
        return found

    def leave(self) -> None:
        """Ends taking part for all; every round has been read. They may come back."""
        assert self._runner.num_pending == 0, "a round would be lost"
        self._runner.remove(self._runner.sequence_ids)

    def forget(self, sequence: TargetSequence) -> None:
        """Lets go of a sequence that has ended."""
        self._refused.discard(sequence.sequence_id)
        guest = self._guests.pop(sequence.sequence_id, None)
        if guest is None:
            return
        if self._runner.holds(sequence.sequence_id):
            self._runner.remove([sequence.sequence_id])
        # Whoever takes these pages next queues its work behind the rounds under way.
        self._head_pages.release(guest.head_pages)

    def _has_room(self, sequence: TargetSequence) -> bool:
        """Makes room for a sequence's part of the next round; False when that cannot be."""
        sequence_id = sequence.sequence_id
        guest = self._guests.setdefault(sequence_id, Guest(sequence))
        if self._runner.holds(sequence_id):
            has_features, needed = True, self._runner.num_kv_tokens(sequence_id)
        else:
            num_tokens, shape = len(sequence.token_ids), self._runner.shape
            needed = shape.num_kv_tokens(num_tokens), shape.num_head_kv_tokens(num_tokens)
            has_features = guest.has_features(self.store, self._leases.page_size)
        if has_features and guest.grow(*needed, self._leases, self._head_pages):
            return True
        self._refused.add(sequence_id)
        return False

    def _place(self, sequences: Sequence[TargetSequence]) -> None:
        """Places those that are new, and gives the others the pages that came."""
        new: list[Newcomer] = []
        for sequence in sequences:
            sequence_id, guest = sequence.sequence_id, self._guests[sequence.sequence_id]
            if self._runner.holds(sequence_id):
                pages = sequence.open_lease.pages
                self._runner.set_pages(sequence_id, pages, guest.head_pages)
            else:
                new.append(guest.newcomer)
        if new:
            self._runner.place(new)
