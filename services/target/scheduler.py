"""Decides what the next step computes. Plain data in, plain data out; no torch.

The scheduler knows no phases. A sequence has committed tokens, computed tokens and perhaps a tree;
a step closes the gap. Prompt chunks, plain tokens and trees share one ragged forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.target.sequence import Sequence
from shared.errors import QueueFull
from shared.kv.leases import KvLeases, OutOfPages
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


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: `num_rows` committed tokens, then the nodes of `tree`.

    Attributes:
        node_indices: index of each node in the tree as it was drafted; they differ from 0 … N-1
            when nodes beyond the output's end were cut.
    """

    sequence: Sequence
    num_rows: int
    tree: TokenTree
    node_indices: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the step computes the last committed token, so that a token is drawn."""
        return self.num_rows == self.sequence.num_uncomputed

    def slots(self, page_size: int) -> list[int]:
        """Returns the KV slot of each row, committed tokens first. Before the commit only."""
        sequence = self.sequence
        assert sequence.lease is not None
        end = sequence.num_computed + self.num_rows + len(self.tree)
        return sequence.lease.slots(sequence.num_computed, end, page_size)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, and which sequences lost their pages for it."""

    scheduled: tuple[ScheduledSequence, ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]


class Scheduler:
    """Owns the waiting queue, the running set and their leases."""

    def __init__(self, leases: KvLeases, limits: SchedulerLimits) -> None:
        self._leases = leases
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

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
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever its state; its computed pages go to the prefix cache."""
        if sequence.lease is None:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
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
        step = _Step(self._limits.max_step_rows)
        for sequence in tuple(self._running):
            if sequence in step.preempted or not is_ready(sequence):
                continue
            self._schedule(sequence, candidate(sequence), step)
        if not step.preempted:
            self._admit(candidate, step)
        return step.as_plan()

    def _schedule(self, sequence: Sequence, tree: TokenTree, step: _Step) -> None:
        num_rows = sequence.num_uncomputed
        if num_rows > 1:
            num_rows = min(num_rows, step.num_prompt_rows_left)
            step.num_prompt_rows_left -= num_rows
        if num_rows == 0:
            return
        is_complete = num_rows == sequence.num_uncomputed
        if not is_complete or num_rows > MAX_COMMITTED_ROWS_BESIDE_TREE:
            tree = EMPTY_TREE
        tree, node_indices = pruned(tree, sequence.num_remaining - 1)
        if not self._fits(sequence, num_rows + len(tree)):
            tree, node_indices = EMPTY_TREE, ()
        if self._make_room(sequence, num_rows + len(tree), step):
            step.scheduled.append(ScheduledSequence(sequence, num_rows, tree, node_indices))

    def _fits(self, sequence: Sequence, num_rows: int) -> bool:
        """Grows the lease if that needs no preemption: no one is preempted for a guess."""
        assert sequence.lease is not None
        try:
            self._leases.grow(sequence.lease, sequence.num_computed + num_rows)
        except OutOfPages:
            return False
        return True

    def _make_room(self, sequence: Sequence, num_rows: int, step: _Step) -> bool:
        """Grows the lease, preempting the youngest sequences, itself at last, if need be."""
        while not self._fits(sequence, num_rows):
            victim = self._victim(step)
            self._preempt(victim, step)
            if victim is sequence:
                return False
        return True

    def _victim(self, step: _Step) -> Sequence:
        """The youngest running sequence that is not part of the step already."""
        scheduled = {id(entry.sequence) for entry in step.scheduled}
        return next(s for s in reversed(self._running) if id(s) not in scheduled)

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        self._running.remove(sequence)
        self._close_lease(sequence)
        self._waiting.appendleft(sequence)
        step.preempted.append(sequence)

    def _admit(self, candidate: Callable[[Sequence], TokenTree], step: _Step) -> None:
        while (
            self._waiting
            and len(self._running) < self._limits.max_running
            and step.num_prompt_rows_left > 0
        ):
            sequence = self._waiting[0]
            if not self._open_lease(sequence):
                return
            self._waiting.popleft()
            self._running.append(sequence)
            step.admitted.append(sequence)
            self._schedule(sequence, candidate(sequence), step)

    def _open_lease(self, sequence: Sequence) -> bool:
        """Opens a lease with pages for every committed token, or leaves all as it was."""
        lease = self._leases.open(sequence.token_ids)
        try:
            self._leases.grow(lease, len(sequence.token_ids))
        except OutOfPages:
            self._leases.close(lease, ())
            return False
        sequence.lease = lease
        sequence.num_computed = lease.num_cached_tokens
        return True

    def _close_lease(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self._leases.close(sequence.lease, sequence.token_ids[: sequence.num_computed])
        sequence.lease = None
        sequence.num_computed = 0


class _Step:
    """A plan in the making."""

    def __init__(self, max_prompt_rows: int) -> None:
        self.num_prompt_rows_left = max_prompt_rows
        self.scheduled: list[ScheduledSequence] = []
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []

    def as_plan(self) -> StepPlan:
        return StepPlan(tuple(self.scheduled), tuple(self.admitted), tuple(self.preempted))


def pruned(tree: TokenTree, max_depth: int) -> tuple[TokenTree, tuple[int, ...]]:
    """Cuts nodes deeper than `max_depth`: the output or the context ends before them.

    Returns:
        The tree that is left and, for each of its nodes, the index in the tree as drafted.
    """
    depths = tree.depths
    kept = tuple(node for node, depth in enumerate(depths) if depth <= max_depth)
    if len(kept) == len(depths):
        return tree, kept
    new_index = {old: new for new, old in enumerate(kept)}
    parents = (tree.parent_indices[node] for node in kept)
    cut = TokenTree(
        tuple(tree.token_ids[node] for node in kept),
        tuple(None if parent is None else new_index[parent] for parent in parents),
        tuple(tree.log_probs[node] for node in kept) if tree.log_probs else (),
    )
    return cut, kept
