"""Decides what the next step computes, and keeps the open sequences with their events. No torch.

There are no phases. A sequence has committed tokens, computed tokens and perhaps a tree; a step
computes what is missing. Prompt chunks, plain tokens and trees share one ragged forward.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from services.target.drafts.attachment import DraftRegistry
from services.target.requests.request import Event, EventSink, GenerationRequest, ModelLimits
from services.target.sequence import Sequence
from shared.errors import InvalidArgument, OutriderError, QueueFull
from shared.generation import Failed, Started
from shared.kv.leases import KvLeases, OutOfPages, PageGroup
from shared.tokens import EMPTY_TREE, TokenTree

MAX_COMMITTED_ROWS_BESIDE_TREE = 64
"""A sequence's tree is scheduled with at most this many of its uncomputed committed tokens, so that
a long prompt chunk never needs an explicit mask."""
MAX_SCORED_ROWS = 256
"""Most rows of a step that score prompt tokens: each keeps logits over the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: `num_rows` tokens, then the nodes of `tree`.

    Attributes:
        start: logical KV index of the first row.
        num_rows: number of committed tokens, and of the pending one if there is one.
        node_indices: index of each node in the tree as it was drafted. They differ from 0 … N-1 if
            nodes beyond the output's end were cut.
        is_complete: whether the step computes the last token, so that the next one is drawn.
        scored: rows, counted from 0, whose next token is a prompt token to be scored.
    """

    sequence: Sequence
    start: int
    num_rows: int
    tree: TokenTree
    node_indices: tuple[int, ...]
    is_complete: bool
    scored: range = range(0)

    def slots(self, page_size: int) -> list[int]:
        """Returns the KV slot of each row, committed tokens first; requires a lease."""
        lease = self.sequence.open_lease
        return lease.slots(self.start, self.start + self.num_rows + len(self.tree), page_size)


@dataclass(slots=True)
class StepPlan:
    """The sequences of one step, and the sequences that lost their pages for it. The scheduler adds
    to it until the rows are used up.

    Attributes:
        drawn: the scheduled sequences that draw.
        num_prompt_rows_left: rows of prompt chunks that the step may still compute.
        num_scored_rows_left: rows among them that may score prompt tokens.
    """

    num_prompt_rows_left: int
    num_scored_rows_left: int = MAX_SCORED_ROWS
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    drawn: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def take_rows(self, sequence: Sequence, num_left: int = 0) -> int:
        """Returns how many of its uncomputed tokens a sequence may compute. More than one token is
        a prompt chunk, which counts towards the limits.

        Args:
            num_left: number of last tokens that a lane computes instead.
        """
        num_rows = sequence.num_uncomputed - num_left
        if num_rows > 1:
            num_rows = min(num_rows, self.num_prompt_rows_left)
            if sequence.is_scoring:
                num_rows = min(num_rows, self.num_scored_rows_left)
                self.num_scored_rows_left -= num_rows
            self.num_prompt_rows_left -= num_rows
        return num_rows


def scored_rows(sequence: Sequence, start: int, num_rows: int) -> range:
    """Returns the rows whose next token is a prompt token at `next_scored` or behind it."""
    end = min(start + num_rows, sequence.num_prompt_tokens - 1)
    return range(max(sequence.next_scored - 1 - start, 0), max(end - start, 0))


CutTree: TypeAlias = tuple[TokenTree, tuple[int, ...]]
"""The remaining tree and, for each of its nodes, the index in the tree as drafted."""
NO_CUT_TREE: CutTree = (EMPTY_TREE, ())


def pruned(tree: TokenTree, max_depth: int) -> CutTree:
    """Cuts the nodes deeper than `max_depth`, where the output or the context ends."""
    if not tree.token_ids:
        return tree, ()
    if len(tree) <= max_depth:
        return tree, tuple(range(len(tree)))
    depths = tree.depths
    kept = tuple(node for node, depth in enumerate(depths) if depth <= max_depth)
    if len(kept) == len(depths):
        return tree, kept
    return tree.only(kept), kept


def narrowed(tree: TokenTree, num_draft_tokens: int | None) -> CutTree:
    """Cuts a tree that has too many nodes to those most probable according to its draft.

    Nodes are ranked by the probability of their path, then by depth; never by their token, so that
    the output does not change. Without probabilities depth alone counts, as drawn chains need.

    Args:
        num_draft_tokens: most rows of the tree, root included; None allows any number.

    Source: nodes ranked by the probability of their path, Miao et al., arXiv 2305.09781.
    """
    if num_draft_tokens is None or len(tree) < num_draft_tokens:
        return tree, tuple(range(len(tree)))
    path_log_probs, depths = _path_log_probs(tree), tree.depths
    ranked = sorted(range(len(tree)), key=lambda node: (-path_log_probs[node], depths[node]))
    kept = tuple(sorted(ranked[: num_draft_tokens - 1]))
    return tree.only(kept), kept


def _path_log_probs(tree: TokenTree) -> list[float]:
    """Returns the log probability of each node's path; never above that of its parent's path, even
    if the draft sent a positive log probability."""
    log_probs = tree.log_probs or [0.0] * len(tree)
    path_log_probs: list[float] = []
    for parent, log_prob in zip(tree.parent_indices, log_probs, strict=True):
        parent_log_prob = 0.0 if parent is None else path_log_probs[parent]
        path_log_probs.append(parent_log_prob + min(log_prob, 0.0))
    return path_log_probs


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step.

    Attributes:
        max_running: most sequences that hold KV pages at once.
        max_waiting: bound of the admission queue.
        max_step_rows: most rows of prompt chunks in a step, besides decode rows and trees.
    """

    max_running: int
    max_waiting: int
    max_step_rows: int


class Lanes(Protocol):
    """Slots of rounds on the device. A round draws the next tokens of the sequences that have a
    lane, beside the planned steps."""

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence has a lane; no step is planned for it."""

    def num_taken(self, sequence: Sequence) -> int:
        """Returns how many of a sequence's last tokens its lane will compute; steps compute the
        tokens before them. 0 where no lane draws its next token."""

    def evict(self, sequence: Sequence) -> None:
        """Reads every launched round and takes a sequence out of its lane. It may have ended."""


class AllLanes:
    """Lanes of any number of kinds; a sequence has a lane of one kind at most."""

    def __init__(self, *kinds: Lanes) -> None:
        self._kinds = kinds

    def holds(self, sequence: Sequence) -> bool:
        """See `Lanes`."""
        return any(lanes.holds(sequence) for lanes in self._kinds)

    def num_taken(self, sequence: Sequence) -> int:
        """See `Lanes`."""
        return max((lanes.num_taken(sequence) for lanes in self._kinds), default=0)

    def evict(self, sequence: Sequence) -> None:
        """See `Lanes`."""
        next(lanes for lanes in self._kinds if lanes.holds(sequence)).evict(sequence)


class Scheduler:
    """Owns the waiting queue, the running list and their KV leases.

    Queue and list are in order of priority, and of age within a priority.

    Attributes:
        lanes: lanes of the sequences that rounds on the device draw for.
    """

    def __init__(self, leases: KvLeases, limits: SchedulerLimits) -> None:
        self._leases = leases
        self._limits = limits
        self.lanes: Lanes = AllLanes()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        # The last sequence that found too few pages, and `num_returns` of the leases at that time.
        self._out_of_pages: tuple[Sequence, int] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def may_admit(self) -> bool:
        """Whether a waiting sequence might run in the next step: fewer than `max_running` run, and
        pages have come free since there were too few for it."""
        if not self._waiting or len(self._running) >= self._limits.max_running:
            return False
        return self._out_of_pages != (self._waiting[0], self._leases.num_returns)

    @property
    def max_step_rows(self) -> int:
        """Most prompt rows that a step computes."""
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
        # Behind the sequences of its own priority.
        self._waiting.insert(_num_up_to(self._waiting, sequence.request.priority), sequence)

    def finish(self, sequence: Sequence) -> None:
        """Removes a waiting or running sequence. Its pages stay until `release`."""
        if sequence.lease is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees a finished sequence's pages; full pages of committed tokens go to the prefix
        cache."""
        if sequence.lease is None:
            return
        # A discarded row may have computed the last token, or a token that was never committed.
        sequence.num_computed = min(sequence.num_computed, len(sequence.token_ids) - 1)
        self._close_lease(sequence)

    def plan(
        self, is_ready: Callable[[Sequence], bool], candidate: Callable[[Sequence], TokenTree]
    ) -> StepPlan:
        """Plans one step.

        Args:
            is_ready: False leaves a running sequence out of this step: it waits for its draft.
            candidate: returns the tree for a sequence's current round, perhaps empty.
        """
        step = StepPlan(self._limits.max_step_rows)
        for sequence in tuple(self._running):
            if self.lanes.holds(sequence) or sequence.lease is None or not is_ready(sequence):
                continue
            self._schedule(sequence, candidate(sequence), step)
        if not step.preempted:
            self._admit(candidate, step)
        return step

    def _schedule(self, sequence: Sequence, tree: TokenTree, step: StepPlan) -> None:
        num_remaining = sequence.num_remaining
        if num_remaining == 0:
            return  # its last token has been drawn, but not read yet
        num_rows = step.take_rows(sequence, self.lanes.num_taken(sequence))
        if num_rows == 0:
            return
        is_complete = num_rows == sequence.num_uncomputed
        # A tree was drafted for the committed tokens; its root cannot be a pending token.
        has_pending = sequence.num_pending > 0
        if has_pending or not is_complete or num_rows > MAX_COMMITTED_ROWS_BESIDE_TREE:
            tree = EMPTY_TREE
        tree, node_indices = pruned(tree, num_remaining - 1)
        num_tokens = sequence.num_computed + num_rows + len(tree)
        # A tree must fit without preemption: no sequence is preempted for drafted tokens.
        if node_indices and not self._leases.try_grow(sequence.open_lease, num_tokens):
            num_tokens -= len(tree)
            tree, node_indices = EMPTY_TREE, ()
        if self._make_room(sequence, num_tokens, step):
            start = sequence.num_computed
            scored = scored_rows(sequence, start, num_rows) if sequence.is_scoring else range(0)
            entry = ScheduledSequence(
                sequence, start, num_rows, tree, node_indices, is_complete, scored
            )
            step.scheduled.append(entry)
            if is_complete:
                step.drawn.append(entry)

    def _make_room(self, sequence: Sequence, num_tokens: int, step: StepPlan) -> bool:
        """Grows the lease to `num_tokens`. If pages are missing, it preempts the youngest
        sequences, in the end the sequence itself; returns False then."""
        lease = sequence.open_lease
        while not self._leases.try_grow(lease, num_tokens):
            victim = self._victim(lease.group, step)
            if self.lanes.holds(victim):
                self.lanes.evict(victim)  # may free pages: sequences may have ended
                continue
            self._retract(victim)
            step.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self, group: PageGroup, step: StepPlan) -> Sequence:
        """Returns the youngest running sequence of the lowest priority, among the sequences with
        pages in `group` that are not scheduled in this step yet."""
        scheduled = {id(entry.sequence) for entry in step.scheduled}
        return next(
            sequence
            for sequence in reversed(self._running)
            if sequence.open_lease.group is group and id(sequence) not in scheduled
        )

    def retract_all(self) -> None:
        """Sends every running sequence back to the queue; no step may be in flight."""
        for sequence in reversed(self.running):
            self._retract(sequence)

    def _retract(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._close_lease(sequence)
        # Before the sequences of its own priority, which are younger.
        self._waiting.insert(_num_up_to(self._waiting, sequence.request.priority - 1), sequence)

    def _admit(self, candidate: Callable[[Sequence], TokenTree], step: StepPlan) -> None:
        while (
            self._waiting
            and len(self._running) < self._limits.max_running
            and step.num_prompt_rows_left > 0
        ):
            sequence = self._waiting[0]
            cacheable, salt = sequence.token_ids, sequence.request.prefix_salt
            if sequence.is_scoring:
                # A prompt token is scored by the row of the token before it. That row must be
                # computed, so only the tokens before the row may come from the prefix cache. The
                # cache never covers the last token it is given, hence the slice ends with that row.
                cacheable = cacheable[: sequence.next_scored]
            try:
                lease = self._leases.open(cacheable, salt, len(sequence.token_ids))
            except OutOfPages:
                self._out_of_pages = (sequence, self._leases.num_returns)
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


def _num_up_to(sequences: SequenceOf[Sequence], priority: int) -> int:
    """Returns how many sequences have this priority or a more urgent one; those come first."""
    return bisect_right(sequences, priority, key=lambda sequence: sequence.request.priority)


class Subscriptions:
    """Open sequences, by id and by their caller's (sink, key), from the admission queue to the last
    event. Owned by the engine thread."""

    def __init__(self, limits: ModelLimits, scheduler: Scheduler, drafts: DraftRegistry) -> None:
        self._limits, self._scheduler, self._drafts = limits, scheduler, drafts
        self._ids = itertools.count(1)
        self._by_id: dict[int, tuple[Sequence, EventSink, int]] = {}
        self._by_caller: dict[tuple[int, int], Sequence] = {}
        self._events: dict[EventSink, list[tuple[int, Event]]] = defaultdict(list)

    @property
    def sequences(self) -> list[Sequence]:
        """Every open sequence, oldest first."""
        return [sequence for sequence, _, _ in self._by_id.values()]

    def submit(self, request: GenerationRequest, sink: EventSink, key: int) -> None:
        """Queues a request, whose events go to `sink` under `key`. If the queue is full, or the
        request names an unknown algorithm, its event is `Failed`."""
        sequence = Sequence(next(self._ids), request, self._limits)
        try:
            self._drafts.check_algorithm(request.draft_algorithm)
            self._scheduler.submit(sequence)
        except (InvalidArgument, QueueFull) as error:
            self._events[sink].append((key, Failed(error)))
            return
        self._by_id[sequence.sequence_id] = (sequence, sink, key)
        self._by_caller[id(sink), key] = sequence

    def start(self, admitted: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Emits `Started` for the sequences that leave the queue for the first time, and returns
        them. The other admitted sequences had been preempted."""
        started = [sequence for sequence in admitted if not sequence.started]
        for sequence in started:
            sequence.started = True
            sequence.decided_s = now_s
            sequence.num_cached_tokens = sequence.num_computed
            queue_s = now_s - sequence.request.arrival_s
            self.emit(sequence, Started(sequence.num_cached_tokens, queue_s))
        return started

    def find(self, sink: EventSink, key: int) -> Sequence | None:
        """Returns the open sequence of a caller."""
        return self._by_caller.get((id(sink), key))

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence's subscription; events emitted before are still delivered."""
        _, sink, key = self._by_id.pop(sequence.sequence_id)
        del self._by_caller[id(sink), key]

    def emit(self, sequence: Sequence, event: Event) -> None:
        """Adds an event to the step's batch of the sequence's sink."""
        _, sink, key = self._by_id[sequence.sequence_id]
        self._events[sink].append((key, event))

    def deliver(self) -> None:
        """Delivers to every sink its events since the last call, in one batch."""
        events, self._events = self._events, defaultdict(list)
        for sink, batch in events.items():
            sink.deliver(batch)

    def fail_all(self, error: OutriderError) -> None:
        """Fails and removes every open sequence, and delivers the events."""
        for _, sink, key in self._by_id.values():
            self._events[sink].append((key, Failed(error)))
        self._by_id.clear()
        self._by_caller.clear()
        self.deliver()
