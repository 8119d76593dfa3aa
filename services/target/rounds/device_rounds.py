"""Lanes: sequences that draft, verify and commit on the device, without the host.

A draft in the target's process may lend its head, see `round_source.py`. A sequence whose request a
round can serve gets a lane when its prompt is computed but for the last token, and keeps it until
it ends. Everyone else, prompts and requests with a grammar, steps beside the lanes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from services.target.drafts.feature_store import FeatureStore
from services.target.rounds.guest import Guest, newcomer_of
from services.target.rounds.policy import CostTable
from services.target.rounds.round_requests import can_be_round
from services.target.rounds.round_runners import RoundRunners
from services.target.rounds.round_source import RoundSource
from services.target.sequence import Sequence as TargetSequence
from shared.kv.leases import KvLeases
from shared.kv.pages import PagePool
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_sequences import SequenceRound
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
        # Whether rounds can serve a request at all, by sequence.
        self._can_serve: dict[int, bool] = {}
        # At which of the leases' returns there was no room for a sequence.
        self._refused: dict[int, int] = {}

    @property
    def shape(self) -> TreeShape:
        """Shape of the trees that rounds have now."""
        return self._runners.shape

    def shapes_for(self, num_sequences: int) -> tuple[TreeShape, ...]:
        """Returns the shapes that take so many sequences, the draft's own first."""
        return self._runners.shapes_for(num_sequences)

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        """All shapes, the draft's own first."""
        return self._runners.shapes

    def measured(self) -> CostTable:
        """Returns what steps of the lanes take on this device."""
        return self._runners.measured()

    @property
    def is_sparse(self) -> bool:
        """Whether so many have left that it pays to place those that are there anew."""
        used = self._runners.num_computed(self._runner.num_slots)
        needed = self._runners.num_computed(len(self._runner.sequence_ids))
        return used >= MIN_SPARSE and used >= 2 * needed

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

    def suits(self, sequence: TargetSequence) -> bool:
        """Whether rounds can do all that the request asks for, and its context is not too long."""
        sequence_id = sequence.sequence_id
        can_serve = self._can_serve.get(sequence_id)
        if can_serve is None:
            rows = self._runners.max_tree_rows
            can_serve = can_be_round(sequence.request, self._algorithm, rows)
            self._can_serve[sequence_id] = can_serve
        if not can_serve or sequence.needs_host_before_next_step:
            return False
        if len(sequence.token_ids) > self._max_context_tokens:
            return False
        # Where there was no room, there may be some once pages have come free.
        return self._refused.get(sequence_id) != self._leases.num_returns

    def holds(self, sequence: TargetSequence) -> bool:
        """Whether a sequence has a lane."""
        return self._runner.holds(sequence.sequence_id)

    @property
    def sequences(self) -> list[TargetSequence]:
        """The sequences that have a lane."""
        return [self._guests[each].sequence for each in self._runner.sequence_ids]

    @property
    def num_placed(self) -> int:
        """Number of sequences that have a lane."""
        return self._runner.num_placed

    @property
    def num_free(self) -> int:
        """Lanes that nobody has."""
        return self._runners.capacity - self._runner.num_placed

    def num_slots_to_read(self, sequence: TargetSequence) -> int:
        """Returns how many slots of a round compute what is left of a sequence's prompt, up to its
        last token; 0 where steps have to."""
        count = sequence.num_uncomputed
        is_read = count > 1 and sequence.num_computed > 0 and sequence.num_pending == 0
        if not is_read or not self._runner.reads_prompts or sequence.is_scoring:
            return 0
        # Their penalties would count the prompt as output.
        if newcomer_of(sequence).is_shaped:
            return 0
        return -(-count // self._runner.shape.max_committed)

    def launch(self, newcomers: Sequence[TargetSequence]) -> bool:
        """Launches a round of all who have a lane and of `newcomers`, whose last tokens are read;
        those before are computed, or can be read by the round.

        False, with nothing launched, where a sequence outgrows its lane or its pages while rounds
        are unread: they have to be read first. Newcomers without room are refused.
        """
        placed = self.sequences
        lacking = [each for each in placed if not self._may_go_on(each)]
        if lacking and self.num_pending:
            return False
        for each in lacking:
            self.evict(each)
        for each in newcomers:
            # Equal prompts need not wait for this one to end. A lane's pages are not replaced, as
            # sharing may do.
            self._leases.publish(each.open_lease, each.token_ids[: each.num_computed])
        new = [each for each in newcomers if self._has_room(each)]
        if not self._runner.num_placed and not new:
            return True
        try:
            self._place([each for each in placed if self.holds(each)], new)
            self._runner.launch()
        except RuntimeError as error:
            if self._runner.is_waited_for:
                raise
            # What the head has to catch up with, or graphs of this size, do not fit beside weights
            # and cache; fewer sequences may.
            if not new and self.num_pending:
                return False
            self._give_up(Shortage.of(error), new)
        return True

    def evict(self, sequence: TargetSequence) -> None:
        """Takes a lane from a sequence; every round has been read."""
        assert self.num_pending == 0, "a round would be lost"
        self._runner.remove([sequence.sequence_id])

    def _may_go_on(self, sequence: TargetSequence) -> bool:
        return len(sequence.token_ids) <= self._max_context_tokens and self._has_room(sequence)

    def _give_up(self, shortage: Shortage, newcomers: Sequence[TargetSequence]) -> None:
        """No memory for so many lanes, or for newcomers to catch up: those who came last leave, or
        all where nobody came."""
        self._runners.confine(max(self._runner.num_placed, 1), shortage)
        placed = self.sequences
        leaving = [each for each in newcomers if self.holds(each)] or placed
        for each in leaving:
            self._refuse(each)
        self._runner.remove(each.sequence_id for each in leaving)

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
            start, num_tokens = guest.sequence.num_computed, len(guest.sequence.token_ids)
            if start == num_tokens - 1:
                # The round began with computing every row that was open.
                guest.num_head_rows = start
            end = num_tokens - 1 + len(each.token_ids)
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
        self._can_serve.pop(sequence.sequence_id, None)
        self._refused.pop(sequence.sequence_id, None)
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
        self._refuse(sequence)
        return False

    def _refuse(self, sequence: TargetSequence) -> None:
        self._refused[sequence.sequence_id] = self._leases.num_returns

    def _place(self, placed: Sequence[TargetSequence], newcomers: Sequence[TargetSequence]) -> None:
        """Gives newcomers their lanes, and the others the pages that came."""
        for sequence in placed:
            sequence_id = sequence.sequence_id
            head_pages = self._guests[sequence_id].head_pages
            self._runner.set_pages(sequence_id, sequence.open_lease.pages, head_pages)
        if newcomers:
            self._runner.place([self._guests[each.sequence_id].newcomer for each in newcomers])
