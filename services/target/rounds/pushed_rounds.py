"""Rounds whose trees remote drafts push ahead and the device selects: their lanes, and when they
are launched.

Prompts, and sequences without a lane, take planned steps beside these rounds. While the device
verifies the trees of a round, drafts push the trees for its possible verdicts. Once these have
arrived they are uploaded, and the next round can be launched before the host has read the last one.
The host's work on the results (tokens, events and verdicts) is then off the critical path. A
sequence that waits for its tree sits rounds out. If no tree is wanted, or pages are missing, there
are no lanes.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext

from services.target.committer import Committed
from services.target.drafts.attachment import Attachment
from services.target.drafts.feature_store import FeatureFeed, FeatureSpec, FeatureStore
from services.target.rounds.lanes import RoundLanes, can_be_round
from services.target.rounds.pushed_trees import NextTrees, TreeForecast, as_step
from services.target.rounds.round_shapes import MAX_ROWS, StepTimer
from services.target.rounds.round_steps import (
    MIN_LANE_TOKENS,
    DeviceTime,
    LaunchedRound,
    RoundResult,
    RoundSteps,
    StepParts,
)
from services.target.sequence import Sequence
from services.target.token_masks import TokenMasks
from shared.kv.leases import KvLeases
from shared.runtime.memory import Shortage
from shared.runtime.round_graphs import ROUND_SIZES
from shared.runtime.round_runner import RoundLimits
from shared.runtime.round_selection import PreparedTree
from shared.runtime.round_state import RoundSampling, SequenceRound
from shared.runtime.runner import ModelRunner
from shared.runtime.selection_runner import (
    PLAIN_SHAPE,
    SelectionRunner,
    covering_shape,
    covering_shape_of,
)
from shared.tokens import TreeShape

logger = logging.getLogger(__name__)


class PushedLanes(RoundLanes):
    """Lanes whose trees are pushed. See `RoundLanes`."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: RoundLimits,
        leases: KvLeases,
        features: FeatureFeed,
        masks: TokenMasks,
    ) -> None:
        super().__init__(leases, features, masks, limits.max_context_tokens)
        self._target, self._limits = runner, limits
        self._capacity = limits.max_sequences
        self._runner = self._make_runner(None)

    @property
    def runner(self) -> SelectionRunner:
        return self._runner

    @property
    def capacity(self) -> int:
        return self._capacity

    def turn_to(self, store: FeatureStore | None) -> None:
        """Sets where rounds store the features of committed tokens; None stores none. Called while
        no sequence has a lane. Where there is no memory for it, sequences get no lanes any more."""
        assert not self.is_running, "sequences would stay behind"
        try:
            self._runner = self._make_runner(store)
        except RuntimeError as error:
            self._limit(0, error)
            return
        self.store = store

    def capture(self, tree: TreeShape) -> None:
        """Captures the graphs of rounds with trees of a shape, and of plain rounds, for every
        number of sequences, so that none is captured under traffic. Leaves out graphs that do not
        fit the memory. Takes seconds on a GPU."""
        for shape in (covering_shape_of(tree), PLAIN_SHAPE):
            for size in reversed(ROUND_SIZES):
                if shape is None or size > self._capacity:
                    continue
                if size * shape.num_draft_tokens > MAX_ROWS:
                    continue
                try:
                    self._runner.turn_to(shape)
                    for sampling in (RoundSampling.GREEDY, RoundSampling.DRAWN):
                        self._runner.capture(size, sampling)
                except RuntimeError as error:
                    self._limit(size - 1, error)

    def plain_costs(self) -> dict[int, float]:
        """Returns the seconds of plain steps by number of sequences."""
        return StepTimer(self._target).plain(self._capacity)

    def prepare(self, prepared: Mapping[Sequence, SequenceOf[PreparedTree]]) -> TreeShape | None:
        """Has the device choose the trees of the next round once the one in flight has ended; see
        `SelectionRunner.prepare`. Sequences that are new to rounds get a lane.

        Returns:
            The shape of the round; None, with no tree prepared, where trees are too large, or pages
            or memory are missing. Sequences that have got a lane keep it.
        """
        wanted = covering_shape(choice.tree for trees in prepared.values() for choice in trees)
        new = [sequence for sequence in prepared if not self.holds(sequence)]
        # Checked before a sequence gets a lane, because it may fail in every step.
        if wanted is None or not self._has_room(prepared, len(new), wanted):
            return None
        self._place(new)
        shape = self._runner.made_shape(wanted)
        if shape != wanted and not self._has_room(prepared, 0, shape):
            return None
        for sequence in prepared:
            self._runner.set_pages(sequence.sequence_id, sequence.open_lease.pages, ())
        try:
            by_id = {sequence.sequence_id: trees for sequence, trees in prepared.items()}
            self._runner.prepare(by_id, shape)
        except RuntimeError as error:
            self._limit(self._runner.num_placed - 1, error)
            return None
        return shape

    def _make_runner(self, store: FeatureStore | None) -> SelectionRunner:
        return SelectionRunner(
            decoder=self._target.decoder,
            pool=self._target.pool,
            limits=self._limits,
            features=None if store is None else store.computed,
            feature_rows=None if store is None else store.rows,
        )

    def _give_up(self, error: RuntimeError) -> None:
        self._limit(self._runner.num_placed - 1, error)
        self.leave()

    def _limit(self, capacity: int, error: RuntimeError) -> None:
        """Lowers the capacity, because rounds of more sequences do not fit the memory."""
        self._capacity = capacity
        logger.warning(
            "no memory for rounds on the device of more than %d sequences that drafts push trees "
            "for; the host leads others: %s",
            *(capacity, self._target.cache.advice(Shortage.of(error))),
        )

    def _has_room(self, sequences: Iterable[Sequence], num_new: int, shape: TreeShape) -> bool:
        """Whether the round has no more than `MAX_ROWS` rows, and the pages of sequences, which
        grow, cover them. No sequence is preempted for it."""
        num_slots = self._runner.num_computed(self._runner.num_slots + num_new)
        num_rows, grow = shape.num_draft_tokens, self._leases.try_grow
        return num_slots * num_rows <= MAX_ROWS and all(
            grow(sequence.open_lease, self._length(sequence) - 1 + num_rows)
            for sequence in sequences
        )


CHECK_S = 5e-5
"""Estimated time to read from the device whether any tree was chosen, and to launch after that."""
_SMOOTHING = 0.1


class EarlyLaunch:
    """Decides whether a round with prepared trees is launched at once, or only when the host has
    read from the device that a tree was chosen. It compares the expected costs of both.

    An early launch saves the time of that read if a tree was prepared for the actual verdict of any
    sequence. Otherwise the device computes an empty round, while it could have begun with the tree
    that a draft sends in response to the verdict.
    """

    def __init__(self) -> None:
        self._round_s = 0.0

    def observe(self, round_s: float) -> None:
        """Takes the time of a round."""
        mean_s = self._round_s or round_s
        self._round_s = mean_s + _SMOOTHING * (round_s - mean_s)

    def pays(self, hit_rates: Iterable[float], response_s: float) -> bool:
        """Whether to launch at once.

        Args:
            hit_rates: for each sequence that may take part, the probability that it does.
            response_s: time in which a draft responds to a verdict with a tree.
        """
        empty_rate = math.prod(1.0 - rate for rate in hit_rates)
        lost_s = max(self._round_s - response_s, 0.0)
        return empty_rate * lost_s <= (1.0 - empty_rate) * CHECK_S


class Turn(enum.Enum):
    """The result of `PushedSteps.step` in a turn of the loop."""

    DONE = enum.auto()
    WAITING = enum.auto()
    NO_LANES = enum.auto()


class PushedSteps(RoundSteps[PushedLanes]):
    """Rounds with pushed trees, before the planned step of a turn. See `RoundSteps`.

    Args:
        lanes: None where such rounds are not possible.
        has_other_lane: whether a sequence has, or may get, a lane of another kind.
        take_offers: takes the candidates that drafts have pushed meanwhile.
    """

    def __init__(
        self,
        lanes: PushedLanes | None,
        parts: StepParts,
        *,
        has_other_lane: Callable[[Sequence], bool],
        features: FeatureFeed,
        take_offers: Callable[[], None],
    ) -> None:
        super().__init__(lanes, parts)
        self._has_other_lane = has_other_lane
        self._features = features
        self._take_offers = take_offers
        self._forecast = TreeForecast(parts.attachments, parts.clock)
        self._draws = False  # before the first turn
        self._early = EarlyLaunch()

    @property
    def shape(self) -> TreeShape | None:
        """Shape of the trees of the round in flight; None while there is none."""
        return self._launched[0].shape if self._launched else None

    def sleep_s(self) -> float | None:
        """Seconds to wait for pushed trees until the next check whether the round in flight is
        done; None without a round in flight."""
        if not self._launched:
            return None
        began_s = self._times.began_s(self._launched[0].start_s)
        return self._wait.sleep_s(self._clock() - began_s)

    def open(self, attachment: Attachment) -> None:
        """Prepares for a draft that attached, if no sequence is running or waiting: captures all
        graphs for its trees, and measures the plain steps with which trees are compared."""
        lanes = self._lanes
        is_idle = not (self._scheduler.num_running or self._scheduler.num_waiting)
        if lanes is None or not is_idle or not self._are_features_known:
            return
        self._turn_to_store(lanes)
        lanes.capture(attachment.base_shape)
        costs = self._attachments.drafts.costs
        costs.plain = costs.plain or lanes.plain_costs()

    def choose(self) -> None:
        """Begins a turn of the loop: decides whether lanes draw in it."""
        lanes = self._lanes
        if lanes is None:
            return
        # A tree has to be wanted, drafts must read no features that the device has yet to write,
        # and sequences are assigned to drafts and taken from them only between planned steps.
        assignments = self._attachments.assignments
        self._draws = (
            lanes.capacity > 0
            and any(not assignment.tree_request.is_paused for assignment in assignments)
            and self._are_features_known
            and not assignments.any_moves(self._scheduler.running, self._clock())
        )
        if self._draws:
            self._turn_to_store(lanes)
        own = lanes.sequences
        keep_lanes = all(map(lanes.fits, own)) and not any(map(self._has_other_lane, own))
        if not self._draws or lanes.is_sparse or not keep_lanes:
            self.settle()

    def num_taken(self, sequence: Sequence) -> int:
        """See `Lanes`. A planned step draws the token after a prompt of one token."""
        lanes = self._drawing
        if lanes is None or len(sequence.token_ids) < MIN_LANE_TOKENS:
            return 0
        if lanes.num_free <= 0 or not lanes.fits(sequence) or sequence.prediction is not None:
            return 0
        request = sequence.request
        assignment = self._attachments.assignments.get(sequence.sequence_id)
        algorithm = request.draft_algorithm or ""
        if assignment is not None:
            algorithm = assignment.attachment.identity.algorithm
        return int(can_be_round(request, algorithm) and not self._has_other_lane(sequence))

    def step(self) -> Turn:
        """Launches, reads and commits rounds, as far as that is possible now.

        Returns:
            WAITING where there is nothing to do but to wait for the device or for drafts, and
            NO_LANES where no lane draws in this turn.
        """
        lanes = self._drawing
        if lanes is None:
            return Turn.NO_LANES
        if self._launched:
            return self._continue(lanes)
        return self._launch_ready(lanes)

    def _with_lanes(self, lanes: PushedLanes) -> list[Sequence]:
        """Returns the sequences that have a lane or can get one now."""
        placed, joining = lanes.runner.sequence_ids, set(self._joining(lanes))
        return [s for s in self._scheduler.running if s.sequence_id in placed or s in joining]

    def aside(self) -> AbstractContextManager[None]:
        """Returns a context whose kernels read the results of earlier rounds in parallel to the
        round in flight."""
        if self._lanes is None or not self._launched:
            return nullcontext()
        return self._lanes.runner.aside()

    def _turn_to_store(self, lanes: PushedLanes) -> None:
        """Has rounds store the features that a draft reads."""
        specs = self._wanted_features.values()
        store = next(map(self._features.kept, specs), None)
        if store is not lanes.store:
            self.settle()
            lanes.turn_to(store)

    def _launch_ready(self, lanes: PushedLanes) -> Turn:
        """Launches a round of the sequences that are ready."""
        sequences = self._with_lanes(lanes)
        if not sequences:
            return Turn.NO_LANES
        trees = self._forecast.ready_trees(sequences)
        if not trees.prepared:
            self._host_gap.wait()
            return Turn.WAITING
        shape = self._prepare(lanes, trees)
        if shape is None:
            # Planned steps need fewer pages, and may preempt.
            self._draws = False
            self.settle()
            return Turn.NO_LANES
        self._attachments.readiness.begin_rounds(trees.sure)
        self._launch(lanes, _round(shape, trees))
        return Turn.DONE

    def _continue(self, lanes: PushedLanes) -> Turn:
        """With a round in flight: launches the next one ahead if its trees have arrived, also one
        of other sequences, and reads the round in flight once it is done."""
        in_flight, sequences = self._launched[0], self._with_lanes(lanes)
        may_launch = self._runs_ahead and len(self._launched) == 1
        if may_launch and self._forecast.is_complete(sequences, in_flight):
            self._launch_ahead(lanes, self._forecast.trees_behind(sequences, in_flight))
        if len(self._launched) == 1 and not lanes.runner.is_done:
            return Turn.WAITING
        self._commit(lanes)
        self._attachments.readiness.update_policies(self._scheduler.running, self._clock())
        if self._launched:
            return Turn.DONE
        # Mostly all sequences wait for drafts, whose verdicts have not been sent yet. No wait times
        # out before that.
        if self._forecast.is_any_ready(self._with_lanes(lanes)):
            self._launch_ready(lanes)
        else:
            self._host_gap.wait()
        return Turn.DONE

    def _launch_ahead(self, lanes: PushedLanes, trees: NextTrees) -> None:
        """Has the device choose trees when the round in flight ends, and launches the next round:
        at once, or once it is known that a tree was chosen."""
        shape = self._prepare(lanes, trees) if trees.prepared else None
        if shape is None:
            return
        responses_s = [draft.timeout.response_s or 0.0 for draft in self._attachments.drafts.live]
        self._attachments.readiness.begin_rounds(trees.sure)
        if not self._early.pays(trees.hit_rates, min(responses_s, default=0.0)):
            if not lanes.runner.has_chosen():
                return
            self._host_gap.read(self._clock())
        self._launch(lanes, _round(shape, trees))

    def _prepare(self, lanes: PushedLanes, trees: NextTrees) -> TreeShape | None:
        """Hands trees to the device, and returns the shape of their round; None where there can be
        no such round."""
        num_captured = lanes.runner.num_captured
        shape = lanes.prepare(trees.prepared)
        if lanes.runner.num_captured != num_captured:
            self._attachments.readiness.disregard()
        return shape

    def _was_launched(self, round_: LaunchedRound, now_s: float) -> None:
        round_.start_s = now_s

    def _observe(
        self, round_: LaunchedRound, results: SequenceOf[RoundResult], took: DeviceTime
    ) -> None:
        for sequence, result in results:
            has_tree = sequence is None or sequence.sequence_id in round_.trees
            took_part = sequence is None or bool(result.token_ids)
            assert took_part == has_tree, "device and host differ on which sequences took part"
        if not self._launched:
            self._host_gap.read(round_.end_s)
        self._early.observe(round_.duration_s)
        self._wait.observe_round(DeviceTime(round_.duration_s))
        self._take_offers()

    def _commit_part(
        self, round_: LaunchedRound, sequence: Sequence, result: SequenceRound
    ) -> Committed:
        entry, decision = as_step(sequence, round_.trees[sequence.sequence_id], result)
        sequence.num_computed += 1
        times_s = round_.start_s, round_.end_s
        part = self._committer.commit(entry, decision, *times_s, is_lane=True)
        if sequence.finish_reason is None and self._launched:
            self._note_chosen(sequence, self._launched[0])
        return part

    def _note_chosen(self, sequence: Sequence, next_round: LaunchedRound) -> None:
        """Notes which prepared tree the device has chosen for the next round: the one that the
        verdict has just selected, if it was prepared."""
        assignment = self._attachments.assignments.get(sequence.sequence_id)
        offered = next_round.offered.get(sequence.sequence_id, ())
        if assignment is not None and any(offer is assignment.candidate for offer in offered):
            assignment.is_stepping = True
            next_round.trees[sequence.sequence_id] = assignment.tree

    @property
    def _are_features_known(self) -> bool:
        """Whether lanes can store the features that drafts read: features of at most one spec,
        which no draft reads on the target's device."""
        drafts = self._attachments.drafts.live
        has_device_reader = any(d.is_in_process and d.reads_features for d in drafts)
        return len(self._wanted_features) <= 1 and not has_device_reader

    @property
    def _wanted_features(self) -> dict[str, FeatureSpec]:
        """The features that drafts read, by key."""
        specs = (draft.feature_spec for draft in self._attachments.drafts.live)
        return {spec.key: spec for spec in specs if spec is not None}


def _round(shape: TreeShape, trees: NextTrees) -> LaunchedRound:
    """Returns the record of a round that is launched now."""
    rows = shape.num_draft_tokens
    return LaunchedRound(0.0, shape, rows, trees=trees.trees, offered=trees.offered)
