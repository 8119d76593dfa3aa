"""Rounds with a draft's head that the device repeats without the host: draft, verify, commit.

The head is shared by a draft in the target's process, or mapped by a draft on this host; see
`RoundSource`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from services.target.adaptive_config import ALWAYS_TREES, AdaptiveConfig
from services.target.committer import Committed
from services.target.drafts.attachment import Attachment, AttachmentStatus
from services.target.drafts.feature_store import FeatureFeed, FeatureStore
from services.target.launcher import LaunchedStep
from services.target.rounds.lanes import Lane, RoundLanes, can_be_round
from services.target.rounds.policy import LanePolicy
from services.target.rounds.round_shapes import RoundShapes, RoundSource
from services.target.rounds.round_steps import (
    MIN_LANE_TOKENS,
    DeviceTime,
    LaunchedRound,
    RoundResult,
    RoundSteps,
    StepParts,
    num_read,
)
from services.target.sequence import Sequence
from services.target.token_masks import TokenMasks
from shared.kv.leases import KvLease, KvLeases, OutOfPages
from shared.runtime.memory import Shortage
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_state import SequenceRound
from shared.tokens import ShapeOrPlain, TreeShape

logger = logging.getLogger(__name__)


class HeadLanes(RoundLanes):
    """Lanes of one head. See `RoundLanes`.

    Args:
        source: the head.
        store: the features that it reads, one row for each slot of the target's pool; None where it
            reads none.
        algorithm: the name of its algorithm.
        reads_prompts: whether rounds may prefill the ends of prompts.

    Attributes:
        shapes: the shapes that rounds may have, and their graphs.
        head_leases: leases of the head's pages.
    """

    def __init__(
        self,
        source: RoundSource,
        shapes: RoundShapes,
        leases: KvLeases,
        features: FeatureFeed,
        store: FeatureStore | None,
        masks: TokenMasks,
        *,
        algorithm: str,
        reads_prompts: bool,
    ) -> None:
        super().__init__(leases, features, masks, source.max_context_tokens, store)
        self.shapes = shapes
        self._algorithm = algorithm
        # Keys and values of a language model depend on tokens alone, so later sequences with the
        # same prefix can read them. Those of a head take one layer to compute.
        self.head_leases = KvLeases.over(source.pages, leases.page_size, prefix_cache=store is None)
        self._reads_prompts = reads_prompts
        # Sequences that got their lanes since the last launch.
        self._joined: list[Sequence] = []
        # Whether rounds can serve a request at all, by sequence.
        self._can_serve: dict[int, bool] = {}
        # The value of `KvLeases.num_returns` when there was no room for a sequence.
        self._refused: dict[int, int] = {}

    @property
    def runner(self) -> RoundRunner:
        return self.shapes.runner

    @property
    def capacity(self) -> int:
        return self.shapes.capacity

    def turn_to(self, shape: TreeShape) -> None:
        """Sets the tree shape of the next rounds. All rounds have been read, unless sequences keep
        their lanes."""
        if not self.shapes.keeps_lanes(shape):
            self.leave()
        self.shapes.turn_to(shape)

    def suits(self, sequence: Sequence) -> bool:
        """Whether rounds support everything that the request asks for, and the sequence is not too
        long."""
        sequence_id = sequence.sequence_id
        can_serve = self._can_serve.get(sequence_id)
        if can_serve is None:
            rows = self.shapes.max_tree_rows
            can_serve = can_be_round(sequence.request, self._algorithm, rows)
            self._can_serve[sequence_id] = can_serve
        if not can_serve or sequence.prediction is not None or not self.fits(sequence):
            return False
        # A sequence for which there was no room is tried again once pages have been freed.
        return self._refused.get(sequence_id) != self._leases.num_returns

    def num_slots_to_read(self, sequence: Sequence) -> int:
        """Returns how many slots of a round compute the rest of a sequence's prompt, its last token
        included; 0 where planned steps have to compute it."""
        count = sequence.num_uncomputed
        is_prompt_end = count > 1 and sequence.num_computed > 0 and sequence.num_pending == 0
        if not self._reads_prompts or not is_prompt_end or sequence.is_scoring:
            return 0
        # Penalties would count the prompt as output, and masks are made for trees only.
        if sequence.is_masked or Lane(sequence).new_lane.is_shaped:
            return 0
        return -(-count // self.runner.shape.max_committed)

    def join(self, joining: SequenceOf[Sequence]) -> None:
        """Gives lanes to sequences whose last tokens are known, and whose other tokens are computed
        or can be computed by the next round. Refuses sequences for which there is no room."""
        new = [sequence for sequence in joining if self._has_room(sequence)]
        self._joined += new
        try:
            self._place(new)
        except RuntimeError as error:
            # The head's catch-up does not fit beside weights and cache; that of fewer sequences
            # may.
            self._give_up(error)

    @property
    def has_joined(self) -> bool:
        """Whether sequences have got their lanes since the last launch."""
        return any(map(self.holds, self._joined))

    def launch(self) -> bool:
        """See `RoundLanes.launch`. Evicts sequences that outgrow their lanes or pages, for which
        all rounds have to be read first."""
        outgrown = [s for s in self.sequences if not (self.fits(s) and self._has_room(s))]
        if outgrown and self.num_pending:
            return False
        for sequence in outgrown:
            self.evict(sequence)
        placed = self.sequences
        if not placed:
            return True
        for sequence in placed:
            head_pages = self._lanes[sequence.sequence_id].head_pages
            self.runner.set_pages(sequence.sequence_id, sequence.open_lease.pages, head_pages)
        try:
            self._queue(placed)
        except RuntimeError as error:
            # Graphs of this size do not fit beside weights and cache; those of fewer sequences may.
            may_wait = not self.runner.is_waited_for and not self.has_joined
            if may_wait and self.num_pending:
                return False
            self._give_up(error)
        self._joined.clear()
        return True

    def forget(self, sequence: Sequence) -> None:
        """See `RoundLanes.forget`."""
        self._can_serve.pop(sequence.sequence_id, None)
        self._refused.pop(sequence.sequence_id, None)
        lane = self._lanes.get(sequence.sequence_id)
        super().forget(sequence)
        if lane is not None and lane.head_lease is not None:
            computed = sequence.token_ids[: lane.num_head_rows]
            self.head_leases.close(lane.head_lease, computed)

    def _give_up(self, error: RuntimeError) -> None:
        """Takes lanes away after a lack of memory: from the sequences that joined since the last
        launch, or from all if none did."""
        if self.runner.is_waited_for:
            raise error
        self.shapes.limit(max(self.runner.num_placed, 1), Shortage.of(error))
        leaving = list(filter(self.holds, self._joined)) or self.sequences
        for sequence in leaving:
            self._refuse(sequence)
        self.runner.remove(sequence.sequence_id for sequence in leaving)

    def _has_room(self, sequence: Sequence) -> bool:
        """Grows the pages of target and head for a sequence's part of the next round; False, and
        the sequence is refused, where that fails. No sequence is preempted for it."""
        lane, shape, length = self._lane(sequence), self.runner.shape, self._length(sequence)
        try:
            if self.holds(sequence) or self._has_features(lane):
                self._leases.grow(sequence.open_lease, shape.num_kv_tokens(length))
                self.head_leases.grow(self._head_lease(lane), shape.num_head_kv_tokens(length))
                return True
        except OutOfPages:
            pass
        self._refuse(sequence)
        return False

    def _head_lease(self, lane: Lane) -> KvLease:
        """Returns a lane's lease of the head's pages, opened on the longest cached prefix. Rounds
        write the rows of the last tokens, so the prefix ends before these."""
        if lane.head_lease is None:
            tokens, salt = lane.sequence.token_ids, lane.sequence.request.cache_salt
            prefix = tokens[: max(len(tokens) - self.shapes.max_tree_rows, 0)]
            lane.head_lease = self.head_leases.open(prefix, salt)
            lane.num_head_rows = lane.head_lease.num_cached_tokens
        return lane.head_lease

    def _has_features(self, lane: Lane) -> bool:
        """Whether all features that the head has yet to read are stored. The sequence takes no part
        in rounds."""
        if self.store is None:
            return True
        end = lane.sequence.num_computed
        start = max(min(lane.num_head_rows, end - 1), 0)
        slots = lane.sequence.open_lease.slots(start, end, self._leases.page_size)
        return self.store.first_stored(slots) == 0

    def _refuse(self, sequence: Sequence) -> None:
        self._refused[sequence.sequence_id] = self._leases.num_returns


MOST_ROWS_BESIDE = 1.25
"""A plain step with rows of prompts is timed if it has at most so many rows for each token."""
FIRST_LATE_PAUSE_S, LAST_LATE_PAUSE_S = 0.1, 1.0
"""Time of plain steps after trees that did not come in time; doubles if that happens again soon."""
MAX_READING_SLOTS = 16
"""Most slots of a round that prefill the ends of prompts; beyond, a planned step is faster."""


class HeadSteps(RoundSteps[HeadLanes]):
    """Rounds with a head, each behind the planned step of the same turn. See `RoundSteps`.

    Args:
        make_lanes: returns the lanes of a draft's head; None where the draft shares none.
        launches_late: whether a launch is put off until the round or step before is about to end.
        config: the shapes to choose from where none is pinned.

    Attributes:
        policy: chooses the shapes; None where there is no choice.
    """

    def __init__(
        self,
        parts: StepParts,
        make_lanes: Callable[[Attachment], HeadLanes | None],
        config: AdaptiveConfig,
        *,
        launches_late: bool,
    ) -> None:
        super().__init__(None, parts)
        self._config = config
        self._launches_late = launches_late
        self._make_lanes = make_lanes
        self._attachment: Attachment | None = None
        self.policy: LanePolicy | None = None
        self._last_shape: ShapeOrPlain = None
        # Whether trees were late, so that sequences take plain steps for a while.
        self._is_late = False
        self._resumes_s, self._pause_s = -math.inf, FIRST_LATE_PAUSE_S
        self._plain_read_s = -math.inf  # when the last plain step was read
        self._began_s = 0.0  # when the host began with the last launch

    def open(self, attachment: Attachment) -> None:
        """Makes lanes with the head of a draft, if the draft shares it.

        Raises:
            RuntimeError: there is no memory for rounds; then there are no lanes.
        """
        lanes = self._make_lanes(attachment)
        if lanes is None:
            return
        policy = self._new_policy(lanes.shapes)
        lanes.shapes.head.warmed_up(None if policy is None else policy.costs.seconds)
        self._attachment, self._lanes, self.policy = attachment, lanes, policy

    @property
    def head_leases(self) -> tuple[KvLeases, ...]:
        """The leases of the head's pages; none without lanes."""
        return () if self._lanes is None else (self._lanes.head_leases,)

    def renew_policy(self) -> None:
        """Forgets what the policy has observed."""
        self.policy = None if self._lanes is None else self._new_policy(self._lanes.shapes)

    def _new_policy(self, shapes: RoundShapes) -> LanePolicy | None:
        if shapes.is_pinned and len(shapes.shapes) == 1:
            return None
        config = ALWAYS_TREES if shapes.is_pinned else self._config
        return LanePolicy(shapes.shapes, shapes.costs(), config)

    @property
    def is_open(self) -> bool:
        """Whether there are lanes, because a draft shares its head."""
        return self._lanes is not None

    def close(self, attachment: Attachment | None) -> None:
        """Ends the rounds, if the draft that has left is the one that shares its head."""
        if self._lanes is not None and attachment is self._attachment:
            self.settle()
            self._lanes.shapes.head.close()
            self._attachment = self._lanes = self.policy = None
            self._is_late = False
            self._draws = True

    def choose(self, settle: Callable[[], None]) -> None:
        """Begins a turn of the loop: decides whether lanes draw in it, and the shape of the trees.

        Args:
            settle: reads and commits the planned step in flight.
        """
        lanes, self._draws, self._reading = self._lanes, True, {}
        if lanes is None:
            return
        running, is_late = self._scheduler.running, self._is_head_late(lanes)
        suited = [sequence for sequence in running if self.takes(sequence)]
        if not suited:
            self._draws = not is_late  # for sequences that are admitted in this turn
            return
        shape = None if is_late else self._choose(lanes, suited)
        if shape is None:
            self._draws = False
            self.settle()
            for sequence in suited:
                self._attachments.assignments.close(sequence)
            return
        if lanes.is_sparse or not lanes.shapes.keeps_lanes(shape):
            settle()
            self.settle()
        lanes.turn_to(shape)

    def _is_head_late(self, lanes: HeadLanes) -> bool:
        """Whether sequences take plain steps for a while, because trees did not come in time."""
        if lanes.runner.is_late:
            now_s = self._clock()
            is_repeated = now_s < self._resumes_s + LAST_LATE_PAUSE_S
            pause_s = 2.0 * self._pause_s if is_repeated else FIRST_LATE_PAUSE_S
            self._pause_s = min(pause_s, LAST_LATE_PAUSE_S)
            self._resumes_s = now_s + self._pause_s
            logger.info("trees did not come in time: plain steps for %g s", self._pause_s)
            self.settle()
            lanes.shapes.head.forgive()
            self._is_late = True
        if self._is_late:  # a head that has not caught up may be frozen, and gets no requests
            is_over = self._clock() >= self._resumes_s and lanes.shapes.head.has_caught_up
            self._is_late = not is_over
        return self._is_late

    def until_launch_s(self) -> float:
        """Returns the seconds until the next step has to be queued behind the round in flight; 0
        for now. All requests that arrive before are admitted together."""
        lanes, running = self._lanes, self._scheduler.running
        if lanes is None or not (self._launches_late and self._launched):
            return 0.0
        if not all(map(lanes.holds, running)):
            return 0.0
        return self._until_launch_s(lanes, self._launched[0].start_s)

    def planned(self, host_s: float, *, is_admitting: bool) -> None:
        """See `RoundWait.observe_planning`."""
        self._wait.observe_planning(host_s, is_admitting=is_admitting)

    def covers_launch(self, step: LaunchedStep) -> bool:
        """Whether the device takes longer for a planned step than the host for the launch of a
        round behind it."""
        lanes = self._drawing
        if lanes is None or not self._launches_late:
            return False
        return self._wait.until_launch_s(lanes.runner.announce_s, step.num_rows) > 0.0

    def until_launch_behind_s(self, step: LaunchedStep) -> float:
        """Returns the seconds until the next step or round has to be queued behind a planned step;
        0 for now. All work before that step has been read, and all requests that arrive until then
        are admitted together."""
        lanes = self._lanes
        return 0.0 if lanes is None else self._until_launch_s(lanes, step.start_s, step.num_rows)

    def _until_launch_s(
        self, lanes: HeadLanes, start_s: float, num_rows: int | None = None
    ) -> float:
        """See `RoundWait.until_launch_s`.

        Args:
            start_s: when the round or step in front was launched.
        """
        elapsed_s = self._clock() - self._times.began_s(start_s) + lanes.runner.announce_s
        is_admitting = self._scheduler.may_admit
        return self._wait.until_launch_s(elapsed_s, num_rows, is_admitting=is_admitting)

    def planned_read(self, step: LaunchedStep, *, is_awaited: bool) -> None:
        """Notes that a planned step was read, and how long it took.

        Args:
            is_awaited: see `DeviceTimes.read`.
        """
        now_s, last_s = self._clock(), self._times.end_s
        is_behind = self._times.is_behind(step.start_s)
        took = self._times.read(step.start_s, now_s, is_awaited=is_awaited)
        self._wait.observe_planned(step.num_rows, took)
        lanes, num_drawn = self._lanes, len(step.plan.drawn)
        if self.policy is None or lanes is None or lanes.runner.num_placed:
            return
        if step.num_rows == num_drawn == self._scheduler.num_running:
            # The host plans a step with masks when it has read the step before: what it does
            # between them counts, if that was a plain step too.
            is_next = not step.allows_run_ahead and last_s == self._plain_read_s
            if is_behind or is_next:
                self.policy.observe_time(None, num_drawn, now_s - last_s)
            self._plain_read_s = now_s
        elif is_behind and took.is_exact and step.num_rows <= MOST_ROWS_BESIDE * num_drawn:
            self.policy.observe_time(None, num_drawn, took.seconds, is_alone=False)

    def join(self) -> None:
        """Gives lanes to sequences whose prompts are computed. Called while the device is busy,
        because the head's catch-up takes the host longer than the launch of a round."""
        lanes = self._drawing
        if lanes is not None:
            self._join(lanes)

    def takes(self, sequence: Sequence) -> bool:
        """Whether a sequence has a lane here, or may get one."""
        lanes = self._lanes
        return lanes is not None and (lanes.holds(sequence) or lanes.suits(sequence))

    def num_taken(self, sequence: Sequence) -> int:
        """See `Lanes`. A round prefills the end of a prompt if there are slots for it. Otherwise
        the planned step that prefills it also draws the first token, a round earlier."""
        lanes = self._drawing
        if lanes is None or len(sequence.token_ids) < MIN_LANE_TOKENS:
            return 0
        if not (lanes.suits(sequence) and lanes.num_free > 0):
            return 0
        num_slots = self._reading.get(sequence.sequence_id)
        if num_slots is None:
            num_slots = lanes.num_slots_to_read(sequence)
            max_slots = min(MAX_READING_SLOTS, lanes.num_free)
            if not num_slots or sum(self._reading.values()) + num_slots > max_slots:
                return int(sequence.num_uncomputed == 1)
            self._reading[sequence.sequence_id] = num_slots
        return sequence.num_uncomputed

    def launch(self, *, is_alone: bool) -> bool:
        """Gives lanes to sequences, then launches a round of all lanes; returns whether it did
        either.

        Args:
            is_alone: no planned step is in flight.
        """
        lanes = self._drawing
        if lanes is None:
            return False
        self._began_s = self._clock()
        has_joining = self._join(lanes)
        if not lanes.runner.num_placed or self._all_end(lanes):
            return has_joining  # refused sequences take plain steps from the next turn on
        is_alone = is_alone and not lanes.has_joined
        if not self._launch(lanes, self._round(lanes, is_alone=is_alone)):
            self._drain(lanes)
            self._began_s = self._clock()
            self._launch(lanes, self._round(lanes, is_alone=is_alone))
        if self.is_under_way:
            self._last_shape = lanes.shapes.shape
        return True

    def _was_launched(self, round_: LaunchedRound, now_s: float) -> None:
        self._wait.observe_launch(now_s - self._began_s)

    def commit(self, *, drains: bool = False) -> bool:
        """Reads and commits rounds; returns whether there were any to read.

        Args:
            drains: read all rounds, also the one that may run ahead.
        """
        lanes = self._lanes
        if lanes is None or not lanes.num_pending:
            return False
        num_before = lanes.num_pending
        while lanes.num_pending > int(self._runs_ahead):
            self._commit(lanes)
        if drains or self._all_end(lanes):
            self._drain(lanes)
        return lanes.num_pending < num_before

    def _join(self, lanes: HeadLanes) -> bool:
        """Gives lanes to the sequences that can have one; returns whether there are any."""
        joining = self._joining(lanes)
        for sequence in joining:
            self._attachments.assignments.close(sequence)
        lanes.join(joining)
        return bool(joining)

    def _round(self, lanes: HeadLanes, *, is_alone: bool) -> LaunchedRound:
        """Returns the record of a round that is launched now."""
        shape, is_first = lanes.shapes.shape, lanes.shapes.shape != self._last_shape
        if is_first:
            # The first round of a shape has no trees grown ahead, and waits until the draft is done
            # with those that it grew for the shape before.
            shape = replace(shape, is_ahead=False)
        num_rows = lanes.runner.shape.num_tree_rows
        return LaunchedRound(self._clock(), shape, num_rows, is_alone, is_timed=not is_first)

    def _choose(self, lanes: HeadLanes, suited: SequenceOf[Sequence]) -> TreeShape | None:
        """Returns the shape of the next round; None for plain steps instead."""
        shapes, policy = lanes.shapes.shapes_for(len(suited)), self.policy
        if policy is None:
            return shapes[0] if shapes else lanes.shapes.shape
        num_greedy = sum(sequence.sampling.is_greedy for sequence in suited)
        shape = policy.choose(num_greedy, len(suited) - num_greedy, shapes, self._clock())
        counts = self._attachments.verdicts.counts
        counts.num_paused_rounds += 0 if shape else len(suited)
        counts.num_probe_rounds += len(suited) if shape and policy.is_probing else 0
        return shape

    @property
    def shape(self) -> TreeShape | None:
        """Shape of the trees in rounds now; None while no sequence takes part."""
        lanes = self._lanes
        return lanes.shapes.shape if lanes is not None and lanes.is_running else None

    @property
    def num_lanes(self) -> int:
        """Sequences that have a lane."""
        return 0 if self._lanes is None else self._lanes.runner.num_placed

    @property
    def num_paused(self) -> int:
        """Sequences that take plain steps, because these are faster or trees are late."""
        return 0 if self._draws else self._scheduler.num_running

    @property
    def pays(self) -> bool | None:
        """Whether rounds with trees are faster than plain steps; None where there is no choice, or
        before that is known."""
        return None if self.policy is None else self.policy.pays

    def comparison(self) -> str:
        """Returns the figures behind `pays`."""
        return "" if self.policy is None else self.policy.comparison()

    def with_rounds(self, status: AttachmentStatus) -> AttachmentStatus:
        """Returns the status of a draft; of the draft that shares its head, with the shape of the
        rounds and the sequences that pause."""
        is_idle = not self.num_lanes + self.num_paused
        if status.attachment is not self._attachment or is_idle:
            return status
        return replace(status, shape=self.shape, num_paused=self.num_paused)

    def assign(self, admitted: Iterable[Sequence], now_s: float) -> None:
        """Assigns admitted sequences to drafts; where there are lanes, all running sequences that
        can have none."""
        running = self.not_taken(self._scheduler.running)
        for sequence in admitted if self._lanes is None else running:
            self._attachments.assignments.assign(sequence, now_s)

    def not_taken(self, running: SequenceOf[Sequence]) -> SequenceOf[Sequence]:
        """Returns the sequences that can have no lane here."""
        if self._lanes is None:
            return running
        return [sequence for sequence in running if not self.takes(sequence)]

    def _all_end(self, lanes: HeadLanes) -> bool:
        """Whether every sequence may end with the rounds in flight. Another round might then serve
        no sequence, and the next prompt would wait for it."""
        if lanes.has_joined:
            return False
        num_unread = lanes.runner.num_unread
        return all(s.num_remaining <= num_unread(s.sequence_id) for s in lanes.sequences)

    def _observe(
        self, round_: LaunchedRound, results: SequenceOf[RoundResult], took: DeviceTime
    ) -> None:
        assert all(result.token_ids for _, result in results), "a lane was left out"
        self._wait.observe_round(took)
        policy, lanes = self.policy, self._lanes
        if policy is None or lanes is None:
            return
        # A round with late trees says nothing about the cost of its shape. `results` is empty if
        # all sequences ended before its draws.
        is_timed = round_.is_timed and (round_.is_alone or took.is_exact)
        if is_timed and not lanes.runner.is_late and results:
            policy.observe_time(
                round_.shape, len(results), round_.duration_s, is_alone=round_.is_alone
            )
        for is_greedy in (False, True):
            own = [
                result
                for sequence, result in results
                if sequence is not None
                and sequence.sampling.is_greedy is is_greedy
                and not num_read(sequence)
            ]
            # Where trees grow ahead, a lane without one had a verdict that was not foreseen.
            with_tree = [r for r in own if r.num_drafted or not round_.shape.is_ahead]
            policy.observe(
                round_.shape,
                is_greedy=is_greedy,
                accepted=[len(result.token_ids) - 1 for result in with_tree],
                num_unforeseen=len(own) - len(with_tree),
            )

    def _commit_part(
        self, round_: LaunchedRound, sequence: Sequence, result: SequenceRound
    ) -> Committed:
        assert self._attachment is not None
        part = self._committer.commit_round(sequence, result, round_.end_s)
        self._attachment.counters.num_verified_rounds += 1
        self._attachment.counters.num_accepted += part.num_accepted
        return part
