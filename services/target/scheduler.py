"""Decides what the next step computes. Plain data in, plain data out; no torch.

The scheduler knows no phases. A sequence has committed tokens, computed tokens and perhaps a tree;
a step closes the gap. Prompt chunks, plain tokens and trees share one ragged forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from services.target.sequence import Sequence
from services.target.step_plan import (
    PlanInProgress,
    ScheduledSequence,
    StepPlan,
    pruned,
    scored_rows,
)
from shared.errors import QueueFull
from shared.kv.leases import KvLeases, OutOfPages, PageGroup
from shared.tokens import EMPTY_TREE, TokenTree

MAX_COMMITTED_ROWS_BESIDE_TREE = 64
"""A tree rides along with at most this many uncomputed committed tokens, so that a long prompt
chunk never needs an explicit mask."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step.

    Attributes:
        max_running: sequences that hold KV pages at once.
        max_waiting: admission queue bound.
        max_step_rows: rows of prompt chunks a step; decode rows and trees come on top.
    """

    max_running: int
    max_waiting: int
    max_step_rows: int


class Lanes(Protocol):
    """Sequences whose next tokens are drawn by rounds on the device, beside the planned steps."""

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence has a lane; no step is planned for it."""

    def num_taken(self, sequence: Sequence) -> int:
        """Returns how many of the last tokens of a sequence its lane is to compute, steps computing
        those before; 0 where no lane draws its next token."""

    def evict(self, sequence: Sequence) -> None:
        """Takes a sequence out of its lane, with every launched round read. It may have ended."""


class AllLanes:
    """Lanes of several kinds, which never have the same sequence; or of none."""

    def __init__(self, *kinds: Lanes) -> None:
        self._kinds = kinds

    def holds(self, sequence: Sequence) -> bool:
        """See `Lanes`."""
        return any(each.holds(sequence) for each in self._kinds)

    def num_taken(self, sequence: Sequence) -> int:
        """See `Lanes`."""
        return max((each.num_taken(sequence) for each in self._kinds), default=0)

    def evict(self, sequence: Sequence) -> None:
        """See `Lanes`."""
        next(each for each in self._kinds if each.holds(sequence)).evict(sequence)


class Scheduler:
    """Owns the waiting queue, the running set and their leases.

    Both are in order of priority, and of age among equals.

    Attributes:
        lanes: who draws elsewhere.
    """

    def __init__(
        self, leases: KvLeases, limits: SchedulerLimits, lanes: Lanes | None = None
    ) -> None:
        self._leases = leases
        self._limits = limits
        self.lanes = lanes or AllLanes()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        # Who had no room, and at which of the leases' returns.
        self._turned_away: tuple[Sequence, int] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def may_admit(self) -> bool:
        """Whether a waiting sequence might run in the next step: there is a place for it, and
        pages have come free since there was no room for it."""
        if not self._waiting or len(self._running) >= self._limits.max_running:
            return False
        return self._turned_away != (self._waiting[0], self._leases.num_returns)

    @property
    def max_step_rows(self) -> int:
        """Rows of prompts that a step computes at most."""
        return self._limits.max_step_rows

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Queues a new sequence.

        Raises:
            QueueFull: the admission queue is at its bound.
        """
        if len(self._waiting) >= self._limits.max_waiting:
            raise QueueFull.of(len(self._waiting), self._limits.max_waiting)
        # Behind those of its own priority.
        self._waiting.insert(_num_up_to(self._waiting, sequence.request.priority), sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever its state. Its pages stay until `release`."""
        if sequence.lease is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees the pages of a finished sequence, if it has any; whole pages of committed tokens go
        to the prefix cache."""
        if sequence.lease is None:
            return
        # A row that was thrown away may have computed the last token, or one that never was.
        sequence.num_computed = min(sequence.num_computed, len(sequence.token_ids) - 1)
        self._close_lease(sequence)

    def plan(
        self,
        is_ready: Callable[[Sequence], bool],
        candidate: Callable[[Sequence], TokenTree],
    ) -> StepPlan:
        """Plans one step.

        Args:
            is_ready: False leaves a running sequence out of this step: its candidates are awaited.
            candidate: the tree for a sequence's current round, perhaps empty.
        """
        step = PlanInProgress(self._limits.max_step_rows)
        for sequence in tuple(self._running):
            if self.lanes.holds(sequence) or sequence.lease is None or not is_ready(sequence):
                continue
            self._schedule(sequence, candidate(sequence), step)
        if not step.preempted:
            self._admit(candidate, step)
        drawn = tuple(entry for entry in step.scheduled if entry.is_complete)
        return StepPlan(tuple(step.scheduled), drawn, tuple(step.admitted), tuple(step.preempted))

    def _schedule(self, sequence: Sequence, tree: TokenTree, step: PlanInProgress) -> None:
        num_remaining = sequence.num_remaining
        if num_remaining == 0:
            return  # its last token is drawn, and not read yet
        num_rows = step.take_rows(sequence, self.lanes.num_taken(sequence))
        if num_rows == 0:
            return
        is_complete = num_rows == sequence.num_uncomputed
        # A tree was drafted for the committed tokens; it cannot hang off one that nobody has read.
        is_read = sequence.num_pending == 0
        if not (is_read and is_complete) or num_rows > MAX_COMMITTED_ROWS_BESIDE_TREE:
            tree = EMPTY_TREE
        tree, node_indices = pruned(tree, num_remaining - 1)
        if node_indices and not self._fits(sequence, num_rows + len(tree)):
            tree, node_indices = EMPTY_TREE, ()
        if self._make_room(sequence, num_rows + len(tree), step):
            start = sequence.num_computed
            scored = scored_rows(sequence, start, num_rows) if sequence.is_scoring else range(0)
            step.scheduled.append(
                ScheduledSequence(
                    sequence, start, num_rows, tree, node_indices, is_complete, scored
                )
            )

    def _fits(self, sequence: Sequence, num_rows: int) -> bool:
        """Grows the lease if that needs no preemption: no one is preempted for a guess."""
        try:
            self._leases.grow(sequence.open_lease, sequence.num_computed + num_rows)
        except OutOfPages:
            return False
        return True

    def _make_room(self, sequence: Sequence, num_rows: int, step: PlanInProgress) -> bool:
        """Grows the lease, preempting the youngest sequences, itself at last, if need be."""
        group = sequence.open_lease.group
        while not self._fits(sequence, num_rows):
            victim = self._victim(group, step)
            if self.lanes.holds(victim):
                self.lanes.evict(victim)  # which may make room: sequences may have ended
                continue
            self._preempt(victim, step)
            if victim is sequence:
                return False
        return True

    def _victim(self, group: PageGroup, step: PlanInProgress) -> Sequence:
        """The youngest of the least urgent running sequences not part of the step already, of those
        whose pages are in `group`."""
        scheduled = {id(entry.sequence) for entry in step.scheduled}
        return next(
            s
            for s in reversed(self._running)
            if s.open_lease.group is group and id(s) not in scheduled
        )

    def retract_all(self) -> None:
        """Sends every running sequence back to the queue; no step is under way."""
        for sequence in reversed(self.running):
            self._send_back(sequence)

    def _preempt(self, sequence: Sequence, step: PlanInProgress) -> None:
        self._send_back(sequence)
        step.preempted.append(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._close_lease(sequence)
        # Before those of its own priority, which are younger.
        self._waiting.insert(_num_up_to(self._waiting, sequence.request.priority - 1), sequence)

    def _admit(self, candidate: Callable[[Sequence], TokenTree], step: PlanInProgress) -> None:
        while (
            self._waiting
            and len(self._running) < self._limits.max_running
            and step.num_prompt_rows_left > 0
        ):
            sequence = self._waiting[0]
            cacheable, salt = sequence.token_ids, sequence.request.prefix_salt
            if sequence.is_scoring:
                # What comes before the row that scores the next prompt token must be there, that
                # row must be computed: for it, one token more.
                cacheable = cacheable[: sequence.next_scored]
            try:
                lease = self._leases.open(cacheable, salt, len(sequence.token_ids))
            except OutOfPages:
                self._turned_away = (sequence, self._leases.num_returns)
                return
            sequence.lease, sequence.num_computed = lease, lease.num_cached_tokens
            self._waiting.popleft()
            self._running.insert(_num_up_to(self._running, sequence.request.priority), sequence)
            step.admitted.append(sequence)
            self._schedule(sequence, candidate(sequence), step)

    def _close_lease(self, sequence: Sequence) -> None:
        self._leases.close(sequence.open_lease, sequence.token_ids[: sequence.num_computed])
        sequence.lease = None
        sequence.num_computed = 0


def _num_up_to(sequences: Iterable[Sequence], priority: int) -> int:
    """Returns how many have their turn no later than `priority` says."""
    return sum(each.request.priority <= priority for each in sequences)
