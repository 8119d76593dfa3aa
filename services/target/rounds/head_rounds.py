"""Rounds with the head of a draft that the host leaves to the device: draft, verify, commit, again.

A draft in the target's process may share its head, or one on this host map it, see `RoundSource`.
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
    LaunchedRound,
    RoundResult,
    RoundSteps,
    StepParts,
    num_read,
)
from services.target.sequence import Sequence
from services.target.token_masks import TokenMasks
from shared.kv.leases import KvLeases, OutOfPages, PagePool
from shared.runtime.memory import Shortage
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_state import SequenceRound
from shared.tokens import Choice, TreeShape

logger = logging.getLogger(__name__)


class HeadLanes(RoundLanes):
    """Lanes of one head. See `RoundLanes`.

    Args:
        source: the head.
        store: the features that it reads, one row a slot of the target's pool; None where it reads
            none.
        algorithm: the name of what it does.
        reads_prompts: whether rounds may read the ends of prompts.

    Attributes:
        shapes: the shapes that rounds may have, and their graphs.
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
        self._head_pages = PagePool(source.pages)
        self._reads_prompts = reads_prompts
        # Since the last launch.
        self._joined: list[Sequence] = []
        # Whether rounds can serve a request at all, by sequence.
        self._can_serve: dict[int, bool] = {}
        # At which of the leases' returns there was no room for a sequence.
        self._refused: dict[int, int] = {}

    @property
    def runner(self) -> RoundRunner:
        """See `RoundLanes.runner`."""
        return self.shapes.runner

    @property
    def capacity(self) -> int:
        """See `RoundLanes.capacity`."""
        return self.shapes.capacity

    def turn_to(self, shape: TreeShape) -> None:
        """Gives the rounds from now on trees of another shape; every round has been read, unless
        sequences keep their lanes."""
        if not self.shapes.keeps_lanes(shape):
            self.leave()
        self.shapes.turn_to(shape)

    def suits(self, sequence: Sequence) -> bool:
        """Whether rounds can do all that the request asks for, and its context is not too long."""
        sequence_id = sequence.sequence_id
        can_serve = self._can_serve.get(sequence_id)
        if can_serve is None:
            rows = self.shapes.max_tree_rows
            can_serve = can_be_round(sequence.request, self._algorithm, rows)
            self._can_serve[sequence_id] = can_serve
        if not can_serve or sequence.prediction is not None or not self.fits(sequence):
            return False
        # Where there was no room, there may be some once pages have come free.
        return self._refused.get(sequence_id) != self._leases.num_returns

    def num_slots_to_read(self, sequence: Sequence) -> int:
        """Returns how many slots of a round compute what is left of a sequence's prompt, up to its
        last token; 0 where steps have to."""
        count = sequence.num_uncomputed
        is_read = count > 1 and sequence.num_computed > 0 and sequence.num_pending == 0
        if not self._reads_prompts or not is_read or sequence.is_scoring:
            return 0
        # Their penalties would count the prompt as output, their masks are those of trees.
        if sequence.is_masked or Lane(sequence).new_lane.is_shaped:
            return 0
        return -(-count // self.runner.shape.max_committed)

    def join(self, joining: SequenceOf[Sequence]) -> None:
        """Gives lanes to sequences whose last tokens are read; those before are computed, or can be
        read by the next round. Who has no room is refused."""
        new = [each for each in joining if self._has_room(each)]
        self._joined += new
        try:
            self._place(new)
        except RuntimeError as error:
            # What the head has to catch up with does not fit beside weights and cache; fewer
            # sequences may.
            self._give_up(error)

    @property
    def has_joined(self) -> bool:
        """Whether sequences have got their lanes since the last launch."""
        return any(map(self.holds, self._joined))

    def launch(self) -> bool:
        """See `RoundLanes.launch`. A sequence that outgrows its lane or its pages leaves; every
        round has to be read before."""
        lacking = [each for each in self.sequences if not self._may_go_on(each)]
        if lacking and self.num_pending:
            return False
        for each in lacking:
            self.evict(each)
        placed = self.sequences
        if not placed:
            return True
        for each in placed:
            head_pages = self._lanes[each.sequence_id].head_pages
            self.runner.set_pages(each.sequence_id, each.open_lease.pages, head_pages)
        try:
            self._queue(placed)
        except RuntimeError as error:
            # Graphs of this size do not fit beside weights and cache; those of fewer may.
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
        if lane is not None:
            self._head_pages.release(lane.head_pages)

    def _give_up(self, error: RuntimeError) -> None:
        """No memory for so many lanes, or for sequences to join them: those who came since the last
        launch leave, or all where nobody came."""
        if self.runner.is_waited_for:
            raise error
        self.shapes.confine(max(self.runner.num_placed, 1), Shortage.of(error))
        leaving = [each for each in self._joined if self.holds(each)] or self.sequences
        for each in leaving:
            self._refuse(each)
        self.runner.remove(each.sequence_id for each in leaving)

    def _may_go_on(self, sequence: Sequence) -> bool:
        return self.fits(sequence) and self._has_room(sequence)

    def _has_room(self, sequence: Sequence) -> bool:
        """Makes the pages of target and head cover a sequence's part of the next round; False when
        that cannot be. Nobody is preempted for it."""
        lane, shape, length = self._lane(sequence), self.runner.shape, self._length(sequence)
        try:
            if self.holds(sequence) or self._has_features(lane):
                self._leases.grow(sequence.open_lease, shape.num_kv_tokens(length))
                num_pages = -(-shape.num_head_kv_tokens(length) // self._leases.page_size)
                if num_pages > len(lane.head_pages):
                    num_missing = num_pages - len(lane.head_pages)
                    lane.head_pages += self._head_pages.allocate(num_missing)
                return True
        except OutOfPages:
            pass
        self._refuse(sequence)
        return False

    def _has_features(self, lane: Lane) -> bool:
        """Whether the features are there that the head has not read; the sequence takes no part."""
        if self.store is None:
            return True
        end = lane.sequence.num_computed
        start = max(min(lane.num_head_rows, end - 1), 0)
        slots = lane.sequence.open_lease.slots(start, end, self._leases.page_size)
        return self.store.first_known(slots) == 0

    def _refuse(self, sequence: Sequence) -> None:
        self._refused[sequence.sequence_id] = self._leases.num_returns


FIRST_LATE_PAUSE_S, LAST_LATE_PAUSE_S = 0.1, 1.0
"""Time without trees after some that did not come; doubles while none come between."""
MAX_READING_SLOTS = 16
"""Slots of a round that read the ends of prompts; above, a step of their own is faster."""


class HeadSteps(RoundSteps[HeadLanes]):
    """Rounds with a head, each behind the planned step of the same turn. See `RoundSteps`.

    Args:
        make_lanes: returns lanes of an embedded draft's head; None where it shares none.
        launches_late: whether a launch is put off until the last one is about to end.
        config: what may be chosen where no shape is pinned.

    Attributes:
        policy: chooses; None where nothing is chosen.
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
        self._last_shape: Choice = None
        # Trees were late, and sequences step plainly.
        self._is_late = False
        self._resumes_s, self._pause_s = -math.inf, FIRST_LATE_PAUSE_S

    def open(self, attachment: Attachment) -> None:
        """A draft attached; if it shares its head, sequences get lanes from now on."""
        lanes = self._make_lanes(attachment)
        if lanes is None:
            return
        self._attachment, self._lanes, self.policy = attachment, lanes, None
        shapes = lanes.shapes
        if not shapes.is_pinned or len(shapes.shapes) > 1:
            config = ALWAYS_TREES if shapes.is_pinned else self._config
            self.policy = LanePolicy(shapes.shapes, shapes.measured(), config)
        shapes.head.warmed_up(None if self.policy is None else self.policy.costs.seconds)

    @property
    def is_open(self) -> bool:
        """Whether there are lanes: a draft's model takes part in rounds."""
        return self._lanes is not None

    def close(self, attachment: Attachment | None) -> None:
        """A draft has left, perhaps the one whose head the rounds have."""
        if self._lanes is not None and attachment is self._attachment:
            self.settle()
            self._lanes.shapes.head.close()
            self._attachment = self._lanes = self.policy = None
            self._is_late = False
            self._draws = True

    def choose(self, settle: Callable[[], None]) -> None:
        """A turn of the loop begins: decides whether lanes draw in it, and trees of which shape.

        Args:
            settle: reads and commits the planned step in flight.
        """
        lanes, self._draws, self._reading = self._lanes, True, {}
        if lanes is None:
            return
        running, is_late = self._scheduler.running, self._is_head_late(lanes)
        suited = [each for each in running if lanes.holds(each) or lanes.suits(each)]
        if not suited:
            self._draws = not is_late  # for sequences that are admitted in this turn
            return
        shape = None if is_late else self._choose(lanes, suited)
        if shape is None:
            self._draws = False
            self.settle()
            self._close_assignments(suited)
            return
        if lanes.is_sparse or not lanes.shapes.keeps_lanes(shape):
            settle()
            self.settle()
        lanes.turn_to(shape)

    def _is_head_late(self, lanes: HeadLanes) -> bool:
        """Whether sequences step plainly because trees did not come in time; they join rounds again
        after a while."""
        if lanes.runner.is_late:
            now_s = self._clock()
            is_again = now_s < self._resumes_s + LAST_LATE_PAUSE_S
            pause_s = 2.0 * self._pause_s if is_again else FIRST_LATE_PAUSE_S
            self._pause_s = min(pause_s, LAST_LATE_PAUSE_S)
            self._resumes_s = now_s + self._pause_s
            logger.info("trees did not come in time: plain steps for %g s", self._pause_s)
            self.settle()
            lanes.shapes.head.forgive()
            self._is_late = True
        if self._is_late:  # a frozen head is not asked again
            is_over = self._clock() >= self._resumes_s and lanes.shapes.head.has_caught_up
            self._is_late = not is_over
        return self._is_late

    def until_launch_s(self) -> float:
        """Returns the seconds until the next round has to be queued behind the one under way; 0
        where that is now. A sequence that arrives until then has its prompt read before it."""
        lanes, running = self._lanes, self._scheduler.running
        if lanes is None or not (self._launches_late and self._launched):
            return 0.0
        if self._scheduler.may_admit or not all(map(lanes.holds, running)):
            return 0.0
        began_s = self._times.began_s(self._launched[0].start_s)
        return self._wait.until_launch_s(self._clock() - began_s)

    def covers_launch(self, step: LaunchedStep) -> bool:
        """Whether a planned step takes the device longer than a round behind it the host."""
        if self._drawing is None or not self._launches_late:
            return False
        return self._wait.until_launch_s(0.0, step.num_rows) > 0.0

    def until_launch_behind_s(self, step: LaunchedStep) -> float:
        """Returns the seconds until the next round has to be queued behind a planned step, before
        which everything is read; 0 where that is now."""
        elapsed_s = self._clock() - self._times.began_s(step.start_s)
        return self._wait.until_launch_s(elapsed_s, step.num_rows)

    def planned_read(self, step: LaunchedStep, *, is_awaited: bool) -> None:
        """The device has computed a planned step.

        Args:
            is_awaited: see `DeviceTimes.read`.
        """
        now_s = self._clock()
        if self._is_plain_decode(step):
            seconds = now_s - self._times.began_s(step.start_s)
            assert self.policy is not None
            self.policy.observe_time(None, step.num_rows, seconds)
        took_s = self._times.read(step.start_s, now_s, is_awaited=is_awaited)
        if took_s is not None:
            self._wait.planned_timed(step.num_rows, took_s)

    def _is_plain_decode(self, step: LaunchedStep) -> bool:
        """Whether a planned step, which is about to be read, is what the policy calls a plain step:
        a token for everybody, and nothing else."""
        lanes, is_behind = self._lanes, self._times.is_behind(step.start_s)
        if self.policy is None or lanes is None or lanes.runner.num_placed or not is_behind:
            return False
        return step.num_rows == len(step.drawn) == self._scheduler.num_running

    def join(self) -> None:
        """Gives lanes to sequences whose prompts are read, while the device computes something:
        their heads catch up, which takes the host longer than to launch a round."""
        lanes = self._drawing
        if lanes is not None:
            self._join(lanes)

    def takes(self, sequence: Sequence) -> bool:
        """Whether a sequence has a lane here, or may get one."""
        lanes = self._lanes
        return lanes is not None and (lanes.holds(sequence) or lanes.suits(sequence))

    def num_taken(self, sequence: Sequence) -> int:
        """See `Lanes`. A round reads the end of a prompt while there are slots for it. Otherwise
        the planned step that reads it draws the first token, too, a round earlier."""
        lanes = self._drawing
        if lanes is None or len(sequence.token_ids) < MIN_LANE_TOKENS:
            return 0
        if not (lanes.suits(sequence) and lanes.num_free > 0):
            return 0
        num_slots = self._reading.get(sequence.sequence_id)
        if num_slots is None:
            num_slots = lanes.num_slots_to_read(sequence)
            most = min(MAX_READING_SLOTS, lanes.num_free)
            if not num_slots or sum(self._reading.values()) + num_slots > most:
                return int(sequence.num_uncomputed == 1)
            self._reading[sequence.sequence_id] = num_slots
        return sequence.num_uncomputed

    def launch(self, *, is_alone: bool) -> bool:
        """Launches a round of all lanes, those included that sequences get now; returns whether
        anything was done.

        Args:
            is_alone: no planned step is under way.
        """
        lanes = self._drawing
        if lanes is None:
            return False
        is_any = self._join(lanes)
        if not lanes.runner.num_placed or self._all_end(lanes):
            return is_any  # who was refused steps plainly from the next turn on
        is_alone = is_alone and not lanes.has_joined
        if not self._launch(lanes, self._round(lanes, is_alone=is_alone)):
            self._drain(lanes)
            self._launch(lanes, self._round(lanes, is_alone=is_alone))
        if self.is_under_way:
            self._last_shape = lanes.shapes.shape
        return True

    def commit(self, *, drains: bool = False) -> bool:
        """Reads and commits the rounds that are due; returns whether there were any.

        Args:
            drains: all are.
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
        """Gives lanes to who can have one; returns whether anybody can."""
        joining = self._joining(lanes)
        self._close_assignments(joining)
        lanes.join(joining)
        return bool(joining)

    def _round(self, lanes: HeadLanes, *, is_alone: bool) -> LaunchedRound:
        """Returns the round that is launched now."""
        shape = lanes.shapes.shape
        if shape != self._last_shape:  # nothing was prepared for it
            shape = replace(shape, is_ahead=False)
        num_rows = lanes.runner.shape.num_tree_rows
        return LaunchedRound(self._clock(), shape, num_rows, is_alone)

    def _choose(self, lanes: HeadLanes, suited: SequenceOf[Sequence]) -> TreeShape | None:
        """Returns the shape of the next round; None to step plainly instead."""
        shapes, policy = lanes.shapes.shapes_for(len(suited)), self.policy
        if policy is None:
            return shapes[0] if shapes else lanes.shapes.shape
        num_greedy = sum(each.sampling.is_greedy for each in suited)
        shape = policy.choose(num_greedy, len(suited) - num_greedy, shapes, self._clock())
        counts = self._attachments.verdicts.counts
        counts.num_paused_rounds += 0 if shape else len(suited)
        counts.num_probe_rounds += len(suited) if shape and policy.is_probing else 0
        return shape

    def _close_assignments(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences from their drafts."""
        for sequence in sequences:
            self._attachments.assignments.close(sequence)

    @property
    def shape(self) -> TreeShape | None:
        """Shape of the trees of rounds now; None while nobody takes part."""
        lanes = self._lanes
        return lanes.shapes.shape if lanes is not None and lanes.is_running else None

    @property
    def num_lanes(self) -> int:
        """Sequences that have a lane."""
        return 0 if self._lanes is None else self._lanes.runner.num_placed

    @property
    def num_paused(self) -> int:
        """Sequences that step plainly because that pays more."""
        return 0 if self._draws else self._scheduler.num_running

    @property
    def pays(self) -> bool | None:
        """Whether rounds with trees are faster than plain steps; None while nothing is chosen."""
        return None if self.policy is None else self.policy.pays

    def comparison(self) -> str:
        """Returns the figures behind `pays`."""
        return "" if self.policy is None else self.policy.comparison()

    def told(self, status: AttachmentStatus) -> AttachmentStatus:
        """Returns what is told of a draft, with what rounds do in its place."""
        is_idle = not self.num_lanes + self.num_paused
        if status.attachment is not self._attachment or is_idle:
            return status
        return replace(status, shape=self.shape, num_paused=self.num_paused)

    def assign(self, admitted: Iterable[Sequence], now_s: float) -> None:
        """Hands new sequences to drafts; where there are lanes, all those that no lane can have."""
        running = self.not_taken(self._scheduler.running)
        for sequence in admitted if self._lanes is None else running:
            self._attachments.assignments.assign(sequence, now_s)

    def not_taken(self, running: SequenceOf[Sequence]) -> SequenceOf[Sequence]:
        """Returns the sequences that no lane can have."""
        if self._lanes is None:
            return running
        return [each for each in running if not self.takes(each)]

    def _all_end(self, lanes: HeadLanes) -> bool:
        """Whether every sequence may end with the rounds under way: another one would be for
        nobody, and the next prompt would wait for it."""
        if lanes.has_joined:
            return False
        num_unread = lanes.runner.num_unread
        return all(each.num_remaining <= num_unread(each.sequence_id) for each in lanes.sequences)

    def _observe(
        self, round_: LaunchedRound, results: SequenceOf[RoundResult], took_s: float | None
    ) -> None:
        """See `RoundSteps._observe`."""
        assert all(each.token_ids for _, each in results), "a lane was left out"
        if took_s is not None:
            self._wait.timed(took_s)
        policy, lanes = self.policy, self._lanes
        if policy is None or lanes is None:
            return
        # What trees that came too late cost says nothing of the shape. Where all have ended before
        # its draws, nobody took part.
        if round_.is_alone and not lanes.runner.is_late and results:
            policy.observe_time(round_.shape, len(results), round_.duration_s)
        for is_greedy in (False, True):
            accepted = [
                len(each.token_ids) - 1
                for sequence, each in results
                if sequence is not None
                and sequence.sampling.is_greedy is is_greedy
                and not num_read(sequence)
            ]
            policy.observe(round_.shape, is_greedy=is_greedy, accepted=accepted)

    def _commit_part(
        self, round_: LaunchedRound, sequence: Sequence, result: SequenceRound
    ) -> Committed:
        """See `RoundSteps._commit_part`."""
        assert self._attachment is not None
        part = self._committer.commit_round(sequence, result, round_.end_s)
        self._attachment.counters.num_verified_rounds += 1
        self._attachment.counters.num_accepted += part.num_accepted
        return part
