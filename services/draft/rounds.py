"""Schedules the draft's work. No torch, no threads, no grpc.

A `step` proposes trees for one batch of all due sequences, whatever target they came from. Then it
computes one chunk of committed tokens for sequences that are behind. Where a batch or a chunk would
be too large, targets take turns. So a long prompt delays the others by one chunk, never by the
whole prompt. A sequence more than a chunk behind gets an empty tree at once: its target goes on.

The remaining time is used to draft ahead for possible verdicts, one forward a step: a verdict that
arrives waits for the forward in progress only. Requested shapes are warmed up between steps.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from services.draft.drafters.drafter import Drafter, Proposal, VerifiedTree
from services.draft.events import CandidatesReady, Output, ProbeDone
from services.draft.likely_verdicts import shared_budget
from services.draft.sequence import DraftSequence, InFlightTree, drop_unknown_tokens
from services.draft.sequence_table import SequenceTable
from shared.candidate_columns import UNCONDITIONAL, CandidateColumns, CandidateRow, condition_key
from shared.tokens import EMPTY_TREE, DraftReport, TokenTree, TreeShape


class FairShares:
    """Fair queueing of the draft's work over its targets: the next sequence comes from the link
    that has received the fewest tokens of those with work."""

    def __init__(self) -> None:
        self._num_tokens: dict[int, int] = {}

    def pick(
        self,
        sequences: Iterable[DraftSequence],
        cost: Callable[[DraftSequence], int],
        budget: int,
    ) -> list[DraftSequence]:
        """Returns sequences until their costs reach the budget, or all sequences if they never do.
        Sequences of one link keep their order.

        Args:
            cost: in tokens, at least 1.
        """
        queues: dict[int, deque[DraftSequence]] = {}
        for sequence in sequences:
            queues.setdefault(sequence.key.link, deque()).append(sequence)
        earlier = [self._num_tokens[link] for link in queues if link in self._num_tokens]
        least = min(earlier, default=0)
        counts = {link: self._num_tokens.get(link, least) for link in queues}
        picked: list[DraftSequence] = []
        while queues and budget > 0:
            link = min(queues, key=counts.__getitem__)
            sequence = queues[link].popleft()
            picked.append(sequence)
            counts[link] += cost(sequence)
            budget -= cost(sequence)
            if not queues[link]:
                del queues[link]
        # A link without work gains no credit for later.
        least = min((counts[link] for link in queues), default=0)
        self._num_tokens = {link: max(count, least) for link, count in counts.items() if queues}
        return picked


# Warm-up of tree shapes while the draft serves, and the shape of trees until then.
#
# A new shape needs CUDA graphs, and capturing them takes as long as many rounds. Trees get a
# requested shape once its graphs exist; until then they keep a shape that has graphs. Graphs are
# captured one at a time: while no sequence is open, or else within a share of the time.

WARM_UP_SHARE = 0.25
"""Share of the time for warm-up while sequences are open; their rounds have no trees then."""

MAX_DEFERRAL_S = 1.0
"""Longest time that due trees come before a warm-up. Under load some tree is always due."""

MAX_WAITING_SHAPES = 8
"""Most shapes that wait for warm-up; those requested longest ago are dropped."""


class Preparation:
    """Requested shapes and warm-up of one drafter. Owned by the engine thread.

    Args:
        announce: called when `is_warming` has changed.
        clock: in seconds.

    Attributes:
        is_warming: whether a warm-up is running, which delays trees.
        last_s: duration of the last warm-up.
    """

    def __init__(
        self, drafter: Drafter, announce: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self.is_warming = False
        self.last_s = 0.0
        self._drafter = drafter
        self._announce = announce
        self._clock = clock
        self._chosen: dict[TreeShape, TreeShape] = {}
        self._last_shape: TreeShape | None = None
        # Most sequences that each waiting shape is warmed up for; the shape requested last first.
        self._waiting: OrderedDict[TreeShape, int] = OrderedDict()
        self._not_before_s = -math.inf
        self._is_idling = False
        self._deferred_until_s = -math.inf

    @property
    def num_waiting(self) -> int:
        """Shapes that wait for warm-up."""
        return len(self._waiting)

    def begin_step(self) -> None:
        """Forgets the shapes chosen in the last step: more may be ready now."""
        self._chosen.clear()

    def shape_for(self, requested: TreeShape, default: TreeShape, num_sequences: int) -> TreeShape:
        """Returns the shape of trees: the requested one if it is ready, else the one used last,
        else the default. The choice stays the same until `begin_step`.

        Args:
            num_sequences: number of open sequences.
        """
        chosen = self._chosen.get(requested)
        if chosen is None:
            chosen = self._chosen[requested] = self._choose(requested, default, num_sequences)
        return chosen

    def is_due(self, *, is_idle: bool, is_tree_due: bool = False) -> bool:
        """Whether to warm up a shape now.

        Args:
            is_idle: no sequence is open.
            is_tree_due: a target waits for a tree.
        """
        while self._waiting:
            shape, num_sequences = next(iter(self._waiting.items()))
            if not self._drafter.is_prepared(shape, num_sequences):
                deferred_until_s = self._deferred_until_s if is_tree_due else -math.inf
                return is_idle or self._clock() >= max(self._not_before_s, deferred_until_s)
            del self._waiting[shape]
        return False

    def advance(self) -> None:
        """Captures one graph of the shape requested last; only if `is_due`."""
        shape, num_sequences = next(iter(self._waiting.items()))
        self._warm(lambda: self._drafter.prepare(shape, num_sequences))

    def ensure(self, shape: TreeShape, num_sequences: int) -> None:
        """Captures all missing graphs of a shape that is used now."""

        def prepare() -> None:
            while self._drafter.prepare(shape, num_sequences):
                pass

        if not self._drafter.is_prepared(shape, num_sequences):
            self._warm(prepare)

    def prepare_next(self, shapes: Iterable[TreeShape]) -> bool:
        """Captures one graph while the draft is idle, for the first of `shapes` that lacks one;
        returns whether one was missing. Only the drafter's call tells, so `is_warming` is announced
        from the second graph on."""

        def prepare() -> None:
            self._is_idling = any(self._drafter.prepare(shape, None) for shape in shapes)

        if self._is_idling:
            self._warm(prepare)
        else:
            prepare()
        return self._is_idling

    def _choose(self, requested: TreeShape, default: TreeShape, num_sequences: int) -> TreeShape:
        for shape in filter(None, (requested, self._last_shape, default)):
            if self._drafter.is_prepared(shape, num_sequences):
                self._last_shape = shape
                return shape
            self._enqueue(shape, num_sequences)
        # No shape is ready, so trees of the default shape wait for its warm-up.
        return default

    def _enqueue(self, shape: TreeShape, num_sequences: int) -> None:
        if not self._waiting:
            self._deferred_until_s = self._clock() + MAX_DEFERRAL_S
        self._waiting[shape] = max(num_sequences, self._waiting.get(shape, 0))
        self._waiting.move_to_end(shape, last=False)
        while len(self._waiting) > MAX_WAITING_SHAPES:
            self._waiting.popitem()

    def _warm(self, prepare: Callable[[], object]) -> None:
        """Runs a warm-up; targets do not wait for trees meanwhile."""
        start_s, self.is_warming = self._clock(), True
        self._announce()
        prepare()
        end_s, self.is_warming = self._clock(), False
        self.last_s = end_s - start_s
        self._not_before_s = end_s + self.last_s * (1.0 / WARM_UP_SHARE - 1.0)
        self._deferred_until_s = self._not_before_s + MAX_DEFERRAL_S
        self._announce()


IDLE_S = 1.0
"""Time from the last sequence until a draft warms up shapes that no target has requested. A target
that tests whether speculation pays comes back soon, and its test would find the draft busy."""


class Rounds:
    """Plans the drafter's work over the sequences of a table.

    Attributes:
        shape: bounds of every tree whose sequence has no shape of its own; may be replaced
            between steps.
        is_pinned: trees keep to `shape` whatever tree their targets request.
        are_rows_cheap: see `shared_budget`.
    """

    def __init__(
        self,
        table: SequenceTable,
        drafter: Drafter,
        shape: TreeShape,
        *,
        chunk_tokens: int,
        is_pinned: bool = False,
        deliver: Callable[[Output], None],
        outcome_budget: int = 0,
        are_rows_cheap: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.shape = shape
        self.is_pinned = is_pinned
        self.are_rows_cheap = are_rows_cheap
        self._table = table
        self._drafter = drafter
        self._num_ready_tokens = drafter.limits.num_ready_tokens
        self._chunk_tokens = max(chunk_tokens, self._num_ready_tokens)
        self._proposals, self._prompts = FairShares(), FairShares()
        self._clock = clock
        self._deliver = deliver
        self._preparation = Preparation(drafter, self._warming_changed, clock)
        self._last_served_s = -math.inf
        self.outcome_budget = outcome_budget

    @property
    def outcome_budget(self) -> int:
        """Most verdicts of a round to prepare candidates for; may be replaced between steps."""
        lookahead = self._drafter.lookahead
        return 0 if lookahead is None else lookahead.budget

    @outcome_budget.setter
    def outcome_budget(self, outcome_budget: int) -> None:
        lookahead = self._drafter.lookahead
        if lookahead is not None:
            lookahead.budget = outcome_budget

    def step(self) -> bool:
        """Sends trees for due sequences, catches up by a chunk, then drafts ahead by a forward.

        True when another step has work without waiting for an event.
        """
        self._preparation.begin_step()
        if self._table.is_serving:
            self._last_served_s = self._clock()
        # Due trees that grow already are sent when they are complete.
        lookahead = self._drafter.lookahead
        due = [
            sequence
            for sequence in self._table.due.values()
            if lookahead is None or not lookahead.resume(sequence)
        ]
        backlogs = [(sequence, self._drafter.backlog(sequence)) for sequence in due]
        ready = [sequence for sequence, backlog in backlogs if backlog <= self._num_ready_tokens]
        batch = self._proposal_batch(ready)
        late = [
            sequence
            for sequence, backlog in backlogs
            if backlog > self._chunk_tokens and not sequence.is_probe
        ]
        start_s = self._clock()
        proposals = self._propose(batch)
        elapsed_s = self._clock() - start_s
        answers = [*(Proposal(sequence, EMPTY_TREE) for sequence in late), *proposals]
        self.send(answers, self._report(elapsed_s))
        num_computed = self._catch_up()
        return self._look_ahead() or num_computed > 0 or len(batch) < len(ready)

    def _proposal_batch(self, ready: list[DraftSequence]) -> list[DraftSequence]:
        """Returns the sequences of one proposal batch. A single target's sequences are one batch;
        several targets take turns if their trees have more nodes than a chunk has tokens."""
        is_shared = len({sequence.key.link for sequence in ready}) > 1
        if not is_shared or sum(map(self._num_nodes, ready)) <= self._chunk_tokens:
            return ready
        return self._proposals.pick(ready, self._num_nodes, self._chunk_tokens)

    def _num_nodes(self, sequence: DraftSequence) -> int:
        return self._shape_for(sequence).max_node_count

    def prepare(self) -> bool:
        """Captures one graph for a requested shape, if it is time. Returns whether there is more
        to do without waiting for an event."""
        is_idle, is_tree_due = not len(self._table), bool(self._table.due)
        if not self._preparation.is_due(is_idle=is_idle, is_tree_due=is_tree_due):
            return False
        self._preparation.advance()
        return is_idle

    def prepare_next(self) -> float | None:
        """Captures one graph for a shape that targets may request, unless a sequence is open or was
        open lately.

        Returns:
            How long to wait for an event before the next call; None waits for an event alone.
        """
        # An open sequence is due once its target has verified a tree, which takes less time.
        if len(self._table):
            return None
        rest_s = self._last_served_s + IDLE_S - self._clock()
        if rest_s > 0.0:
            return rest_s
        requested = () if self.is_pinned else self._table.candidate_shapes
        return 0.0 if self._preparation.prepare_next((self.shape, *requested)) else None

    @property
    def num_unprepared(self) -> int:
        """Requested shapes that are not warmed up yet."""
        return self._preparation.num_waiting

    def announce(self, link: int) -> None:
        """Sends a target the pinned shape and the warm-up state at once, without a tree: the target
        may have paused every sequence."""
        self._deliver(CandidatesReady(link, CandidateColumns(), self._report(None)))

    def _warming_changed(self) -> None:
        for link in self._table.links:
            self.announce(link)
        if not self._preparation.is_warming:
            self._table.recorder.prepared(self._preparation.last_s)

    def send(self, proposals: Iterable[Proposal], report: DraftReport) -> None:
        """Delivers one message a link; sequences with a tree for their round are due no more."""
        by_link: dict[int, list[CandidateRow]] = {}
        for proposal in proposals:
            sequence = proposal.sequence
            if not self._table.holds(sequence):
                continue
            tree = drop_unknown_tokens(proposal.tree, sequence.vocab_size)
            if proposal.condition is None:
                self._table.due.pop(sequence.key, None)
            if sequence.is_probe:
                self._table.close(sequence.key)
                self._deliver(ProbeDone(sequence.key.link, tree, sequence.draft_s))
                continue
            row = self._row(proposal, tree)
            if row is not None:
                by_link.setdefault(sequence.key.link, []).append(row)
        for link, rows in by_link.items():
            self._deliver(CandidatesReady(link, CandidateColumns.of_rows(rows), report))

    def _row(self, proposal: Proposal, tree: TokenTree) -> CandidateRow | None:
        """Returns the candidate's row; None when no verdict can use the tree."""
        sequence, condition = proposal.sequence, proposal.condition
        candidate_id, key = 0, UNCONDITIONAL
        if condition is not None:
            is_known = condition.bonus_token_id < sequence.vocab_size
            if sequence.in_flight is None or not is_known or not tree.token_ids:
                return None
            candidate_id = sequence.new_candidate_id()
            key = sequence.in_flight.push(condition_key(condition), candidate_id, tree)
        elif self._budget(sequence) > 0 and tree.token_ids:
            # Conditions of later candidates name this tree: it is the in-flight tree from now on.
            candidate_id = sequence.new_candidate_id()
            sequence.in_flight = InFlightTree(candidate_id, tree)
            self._table.unprepared[sequence.key] = sequence
        shape = None if sequence.tree_request.shape is None else proposal.shape
        fence = sequence.key.sequence_id, sequence.round, len(sequence.token_ids)
        return *fence, candidate_id, *key, shape, tree

    def _look_ahead(self) -> bool:
        """Prepares for verdicts by one forward. Returns whether there is more to do."""
        lookahead, unprepared = self._drafter.lookahead, list(self._table.unprepared.values())
        self._table.unprepared.clear()
        if lookahead is None:
            return False
        start_s = self._clock()
        for sequence in unprepared:
            budget, in_flight = self._budget(sequence), sequence.in_flight
            if not budget or in_flight is None:
                continue
            budget = shared_budget(budget, len(self._table), are_rows_cheap=self.are_rows_cheap)
            budget = min(budget, sequence.max_conditional)
            if budget:
                # May wait for the device to find the continuations of the in-flight tree's nodes.
                shape = self._shape_for(sequence)
                lookahead.begin(VerifiedTree(sequence, in_flight.tree, shape, budget))
        if lookahead.has_work:
            begun_s = self._clock()
            proposals = lookahead.advance()
            end_s = self._clock()
            num_pushed = sum(proposal.condition is not None for proposal in proposals)
            self._table.recorder.drafted_ahead(num_pushed, end_s - start_s)
            self.send(proposals, self._report(end_s - begun_s))
        return lookahead.has_work or bool(self._table.unprepared)

    def _budget(self, sequence: DraftSequence) -> int:
        """Returns the most verdicts to prepare for on a sequence's tree: the outcome budget, or
        fewer where the target finds that more do not pay."""
        requested = None if self.is_pinned else sequence.tree_request.num_outcomes
        budget = self.outcome_budget
        return budget if requested is None else min(budget, requested)

    def _propose(self, ready: Sequence[DraftSequence]) -> list[Proposal]:
        by_shape: dict[tuple[TreeShape, bool], list[DraftSequence]] = {}
        for sequence in ready:
            batch_key = self._shape_for(sequence), sequence.draws_chains
            by_shape.setdefault(batch_key, []).append(sequence)
        proposals: list[Proposal] = []
        for (shape, _), sequences in by_shape.items():
            if any(self._needs_graphs(sequence) for sequence in sequences):
                self._preparation.ensure(shape, len(self._table))
            batch = self._reserve_all(sequences, shape)
            start_s = self._clock()
            proposed = self._drafter.propose(batch, shape) if batch else []
            elapsed_s = self._clock() - start_s
            for sequence in batch:
                sequence.draft_s += elapsed_s
            if proposed:
                self._table.recorder.proposed(proposed, elapsed_s)
            proposals += [Proposal(p.sequence, p.tree, p.condition, shape) for p in proposed]
        return proposals

    def _catch_up(self) -> int:
        """Computes a chunk of the oldest backlogs; returns the number of its tokens."""
        behind = self._table.behind(self._num_ready_tokens)
        batch = self._reserve_all(self._prompts.pick(behind, self._chunk_size, self._chunk_tokens))
        start_s = self._clock()
        num_computed = self._drafter.catch_up(batch, self._chunk_tokens) if batch else 0
        elapsed_s = self._clock() - start_s
        for sequence in batch:
            sequence.draft_s += elapsed_s
        if num_computed:
            self._table.recorder.caught_up(num_computed, elapsed_s)
        return num_computed

    def _chunk_size(self, sequence: DraftSequence) -> int:
        return min(self._drafter.backlog(sequence), self._chunk_tokens)

    def _reserve_all(
        self, sequences: Sequence[DraftSequence], shape: TreeShape | None = None
    ) -> list[DraftSequence]:
        """Reserves memory for each sequence; returns those for which that succeeded. Where memory
        is short, the least recently used sequences are released.

        Args:
            shape: shape of all trees; None where the sequences' shapes differ.
        """
        reserved: list[DraftSequence] = []
        for sequence in sequences:
            tree_shape = shape or self._shape_for(sequence)
            has_room = self._table.holds(sequence) and (
                self._drafter.reserve(sequence, tree_shape)
                or self._evict_for(sequence, tree_shape, reserved)
            )
            if has_room:
                reserved.append(sequence)
        return reserved

    def _evict_for(
        self, sequence: DraftSequence, shape: TreeShape, reserved: Sequence[DraftSequence]
    ) -> bool:
        spared = {sequence.key, *(kept.key for kept in reserved)}
        while not self._drafter.reserve(sequence, shape):
            victim = self._table.least_recently_used(spared=spared)
            if victim is None or sequence.is_probe:
                self._table.release(sequence)
                return False
            self._table.release(victim)
        return True

    def _shape_for(self, sequence: DraftSequence) -> TreeShape:
        requested = None if self.is_pinned else sequence.tree_request.shape
        if requested is not None and self._needs_graphs(sequence):
            requested = self._preparation.shape_for(requested, self.shape, len(self._table))
        shape = sequence.shape or requested or self.shape
        limit = sequence.max_nodes + 1
        return replace(shape, num_draft_tokens=limit) if shape.num_draft_tokens > limit else shape

    @staticmethod
    def _needs_graphs(sequence: DraftSequence) -> bool:
        """Whether the sequence's trees are grown by graphs that a drafter captures ahead of time.
        A probe waits for its graphs in any case."""
        return not sequence.is_probe and sequence.grows_whole

    def _report(self, draft_s: float | None) -> DraftReport:
        pinned_shape = self.shape if self.is_pinned else None
        return DraftReport(draft_s, pinned_shape, self._preparation.is_warming)
