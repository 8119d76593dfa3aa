"""Rounds whose trees remote drafts push ahead, and the device selects: their lanes, and when each
is launched.

Planned steps of prompts, and of whoever has no lane, go beside them. While the device verifies the
trees of a round, drafts push those for its ends. Once they are here they are uploaded, and the next
round can be launched before the host has read the last one. What the host makes of that, tokens,
events and verdicts, is then off the critical path. A sequence that waits for its tree sits rounds
out. Where no tree is wanted, and where pages are missing, there are no lanes.
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
    LaunchedRound,
    RoundResult,
    RoundSteps,
    StepParts,
)
from services.target.sequence import Sequence
from services.target.step_report import HostGap
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
        self._runner = self._made(None)

    @property
    def runner(self) -> SelectionRunner:
        """See `RoundLanes.runner`."""
        return self._runner

    @property
    def capacity(self) -> int:
        """See `RoundLanes.capacity`."""
        return self._capacity

    def turn_to(self, store: FeatureStore | None) -> None:
        """Has rounds keep the features of what they commit, or none; no sequence has a lane. Where
        there is no memory for that, none gets one any more."""
        assert not self.is_running, "sequences would stay behind"
        try:
            self._runner = self._made(store)
        except RuntimeError as error:
            self._confine(0, error)
            return
        self.store = store

    def capture(self, tree: TreeShape) -> None:
        """Makes the graphs of rounds with trees of a shape, and of plain ones, for every number of
        sequences, so that none is made under traffic; those that do not fit the memory are left
        out. Takes seconds on a GPU."""
        for shape in (covering_shape_of(tree), PLAIN_SHAPE):
            for size in reversed(ROUND_SIZES):
                if shape is None or size * shape.num_draft_tokens > MAX_ROWS:
                    continue
                if size > self._capacity:
                    continue
                try:
                    self._runner.turn_to(shape)
                    for sampling in (RoundSampling.GREEDY, RoundSampling.DRAWN):
                        self._runner.capture(size, sampling)
                except RuntimeError as error:
                    self._confine(size - 1, error)

    def plain_costs(self) -> dict[int, float]:
        """Returns the seconds of plain steps by number of sequences."""
        return StepTimer(self._target).plain(self._capacity)

    def prepare(self, prepared: Mapping[Sequence, SequenceOf[PreparedTree]]) -> TreeShape | None:
        """Has the device choose the trees of the next round once the one under way has ended; see
        `SelectionRunner.prepare`. Sequences that are new to rounds get a lane.

        Returns:
            The shape of the round; None, with no tree prepared, where trees are too large, or pages
            or memory are missing. Sequences that have got a lane keep it.
        """
        wanted = covering_shape(each.tree for trees in prepared.values() for each in trees)
        new = [each for each in prepared if not self.holds(each)]
        # Before anyone gets a lane: this may be so in every step.
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
            self._confine(self._runner.num_placed - 1, error)
            return None
        return shape

    def _made(self, store: FeatureStore | None) -> SelectionRunner:
        return SelectionRunner(
            decoder=self._target.decoder,
            pool=self._target.pool,
            limits=self._limits,
            features=None if store is None else store.computed,
            feature_rows=None if store is None else store.rows,
        )

    def _give_up(self, error: RuntimeError) -> None:
        self._confine(self._runner.num_placed - 1, error)
        self.leave()

    def _confine(self, capacity: int, error: RuntimeError) -> None:
        """No memory is left for rounds of more sequences."""
        self._capacity = capacity
        logger.warning(
            "no memory for rounds on the device of more than %d sequences that drafts push trees "
            "for; the host leads others: %s",
            *(capacity, self._target.cache.advice(Shortage.of(error))),
        )

    def _has_room(self, sequences: Iterable[Sequence], num_new: int, shape: TreeShape) -> bool:
        """Whether so many rows are worth it, and the pages of sequences, which grow, cover them;
        nobody is preempted for it."""
        num_slots = self._runner.num_computed(self._runner.num_slots + num_new)
        num_rows, grow = shape.num_draft_tokens, self._leases.try_grow
        return num_slots * num_rows <= MAX_ROWS and all(
            grow(each.open_lease, self._length(each) - 1 + num_rows) for each in sequences
        )


ASKING_S = 5e-5
"""About what it costs to read from the device which trees were chosen, and to launch then."""
_SMOOTHING = 0.1


class EarlyLaunch:
    """Decides whether a round whose trees were prepared is launched at once, or when the device has
    told that any tree was chosen: by what rounds take and how often drafts foresee verdicts.

    Where a tree was prepared for the right ending, that saves the time in which the host learns so.
    Where none was for any sequence, the device computes a round for nobody, while it could have
    begun with the tree that the draft sends for the verdict.
    """

    def __init__(self) -> None:
        self._round_s = 0.0

    def timed(self, round_s: float) -> None:
        """A round took so long."""
        known = self._round_s or round_s
        self._round_s = known + _SMOOTHING * (round_s - known)

    def pays(self, hit_rates: Iterable[float], response_s: float) -> bool:
        """Whether to launch at once.

        Args:
            hit_rates: of the sequences that may take part, how likely each does.
            response_s: how long a draft takes to send a tree for a verdict.
        """
        for_nobody = math.prod(1.0 - rate for rate in hit_rates)
        lost_s = max(self._round_s - response_s, 0.0)
        return for_nobody * lost_s <= (1.0 - for_nobody) * ASKING_S


class Turn(enum.Enum):
    """The result of a turn of the loop."""

    DONE = enum.auto()
    WAITING = enum.auto()
    ELSEWHERE = enum.auto()


class PushedSteps(RoundSteps[PushedLanes]):
    """Rounds with pushed trees, before the planned step of a turn. See `RoundSteps`.

    Args:
        lanes: None has none.
        is_elsewhere: whether a sequence has, or is to have, a lane of another kind.
        host_gap: that of the loop.
        take_offers: takes what drafts pushed meanwhile.
    """

    def __init__(
        self,
        lanes: PushedLanes | None,
        parts: StepParts,
        *,
        is_elsewhere: Callable[[Sequence], bool],
        features: FeatureFeed,
        host_gap: HostGap,
        take_offers: Callable[[], None],
    ) -> None:
        super().__init__(lanes, parts)
        self._is_elsewhere = is_elsewhere
        self._features = features
        self._host_gap = host_gap
        self._take_offers = take_offers
        self._forecast = TreeForecast(parts.attachments, parts.clock)
        self._draws = False  # until the first turn
        self._early = EarlyLaunch()

    @property
    def shape(self) -> TreeShape | None:
        """Shape of the trees of the round under way; None while there is none."""
        return self._launched[0].shape if self._launched else None

    def patience_s(self) -> float | None:
        """Seconds to wait for pushed trees until it is time to check whether the round under
        way is done; None where there is none."""
        if not self._launched:
            return None
        began_s = self._times.began_s(self._launched[0].start_s)
        return self._wait.patience_s(self._clock() - began_s)

    def open(self, attachment: Attachment) -> None:
        """A draft attached. While nobody waits for it, all graphs for its trees are made, and plain
        steps are measured, with which its trees are compared."""
        lanes = self._lanes
        is_idle = not (self._scheduler.num_running or self._scheduler.num_waiting)
        if lanes is None or not is_idle or not self._are_features_known:
            return
        self._turn_to_store(lanes)
        lanes.capture(attachment.base_shape)
        costs = self._attachments.drafts.costs
        costs.plain = costs.plain or lanes.plain_costs()

    def choose(self) -> None:
        """A turn of the loop begins: decides whether lanes draw in it."""
        lanes = self._lanes
        if lanes is None:
            return
        self._draws = lanes.capacity > 0 and self._are_terms_met
        if self._draws:
            self._turn_to_store(lanes)
        own = lanes.sequences
        stay = all(map(lanes.fits, own)) and not any(map(self._is_elsewhere, own))
        if not self._draws or lanes.is_sparse or not stay:
            self.settle()

    def num_taken(self, sequence: Sequence) -> int:
        """See `Lanes`. Somebody has to draw the token after a prompt of one."""
        lanes = self._drawing
        if lanes is None or len(sequence.token_ids) < MIN_LANE_TOKENS:
            return 0
        suits = lanes.num_free > 0 and lanes.fits(sequence) and self._suits(sequence)
        return int(suits and not self._is_elsewhere(sequence))

    def step(self) -> Turn:
        """Does what can be done of a round.

        Returns:
            WAITING where there is nothing to do but to wait for the device or for drafts, and
            ELSEWHERE where no lane draws in this turn.
        """
        lanes = self._drawing
        if lanes is None:
            return Turn.ELSEWHERE
        if self._launched:
            return self._go_on(lanes)
        return self._launch_ready(lanes)

    def _part(self, lanes: PushedLanes) -> list[Sequence]:
        """Returns who has a lane, and who can get one now."""
        placed, joining = lanes.runner.sequence_ids, set(self._joining(lanes))
        running = self._scheduler.running
        return [each for each in running if each.sequence_id in placed or each in joining]

    def aside(self) -> AbstractContextManager[None]:
        """Returns a context in which what earlier rounds left is read beside the one under way."""
        if self._lanes is None or not self._launched:
            return nullcontext()
        return self._lanes.runner.aside()

    def _turn_to_store(self, lanes: PushedLanes) -> None:
        """Has rounds keep the features that a draft reads."""
        specs = self._wanted_features.values()
        store = next(map(self._features.kept, specs), None)
        if store is not lanes.store:
            self.settle()
            lanes.turn_to(store)

    def _launch_ready(self, lanes: PushedLanes) -> Turn:
        """Launches a round of the sequences that wait for nothing."""
        sequences = self._part(lanes)
        if not sequences:
            return Turn.ELSEWHERE
        trees = self._forecast.of_ready(sequences)
        if not trees.prepared:
            self._host_gap.wait()
            return Turn.WAITING
        shape = self._prepare(lanes, trees)
        if shape is None:
            # Planned steps need fewer pages, and may preempt.
            self._draws = False
            self.settle()
            return Turn.ELSEWHERE
        self._attachments.readiness.begin_rounds(trees.sure)
        self._launch(lanes, _round(shape, trees))
        return Turn.DONE

    def _go_on(self, lanes: PushedLanes) -> Turn:
        """With a round under way: launches the next one ahead, if what was pushed for it is here,
        or one of other sequences, and reads the one under way once it is done."""
        under_way, sequences = self._launched[0], self._part(lanes)
        may_launch = self._runs_ahead and len(self._launched) == 1
        if may_launch and self._forecast.is_complete(sequences, under_way):
            self._launch_ahead(lanes, self._forecast.after(sequences, under_way))
        if len(self._launched) == 1 and not lanes.runner.is_done:
            return Turn.WAITING
        self._commit(lanes)
        self._attachments.readiness.weigh(self._scheduler.running, self._clock())
        if self._launched:
            return Turn.DONE
        # Mostly all sequences wait for their drafts, which are yet to be told: nobody gives up
        # waiting before that.
        if self._forecast.is_any_here(self._part(lanes)):
            self._launch_ready(lanes)
        else:
            self._host_gap.wait()
        return Turn.DONE

    def _launch_ahead(self, lanes: PushedLanes, trees: NextTrees) -> None:
        """Has trees chosen for the end of the round under way, and launches the next one: at once,
        or when it is known that any was."""
        shape = self._prepare(lanes, trees) if trees.prepared else None
        if shape is None:
            return
        known = [each.timeout.response_s or 0.0 for each in self._attachments.drafts.live]
        self._attachments.readiness.begin_rounds(trees.sure)
        if not self._early.pays(trees.hit_rates, min(known, default=0.0)):
            if not lanes.runner.has_chosen():
                return
            self._host_gap.read(self._clock())
        self._launch(lanes, _round(shape, trees))

    def _prepare(self, lanes: PushedLanes, trees: NextTrees) -> TreeShape | None:
        """Hands trees to the device; None where they cannot be a round."""
        num_captured = lanes.runner.num_captured
        shape = lanes.prepare(trees.prepared)
        if lanes.runner.num_captured != num_captured:
            self._attachments.readiness.disregard()
        return shape

    def _was_launched(self, round_: LaunchedRound) -> None:
        """See `RoundSteps._was_launched`."""
        round_.start_s = self._clock()
        round_.host_gap_s = self._host_gap.launched(round_.start_s)

    def _observe(
        self, round_: LaunchedRound, results: SequenceOf[RoundResult], took_s: float | None
    ) -> None:
        """See `RoundSteps._observe`."""
        for sequence, each in results:
            is_known = sequence is None or sequence.sequence_id in round_.trees
            did = sequence is None or bool(each.token_ids)
            assert did == is_known, "device and host differ on who took part"
        if not self._launched:
            self._host_gap.read(round_.end_s)
        self._early.timed(round_.duration_s)
        self._wait.timed(round_.duration_s)
        self._take_offers()

    def _commit_part(
        self, round_: LaunchedRound, sequence: Sequence, result: SequenceRound
    ) -> Committed:
        """See `RoundSteps._commit_part`."""
        entry, decision = as_step(sequence, round_.trees[sequence.sequence_id], result)
        sequence.num_computed += 1
        times_s = round_.start_s, round_.end_s
        part = self._committer.commit(entry, decision, *times_s, is_lane=True)
        if sequence.finish_reason is None and self._launched:
            self._follow(sequence, self._launched[0])
        return part

    def _follow(self, sequence: Sequence, next_round: LaunchedRound) -> None:
        """Notes which of the prepared trees the device has taken for the next round: the one that
        the verdict has just selected, if it was among them."""
        assignment = self._attachments.assignments.get(sequence.sequence_id)
        offered = next_round.offered.get(sequence.sequence_id, ())
        if assignment is not None and any(each is assignment.candidate for each in offered):
            assignment.is_stepping = True
            next_round.trees[sequence.sequence_id] = assignment.tree

    @property
    def _are_terms_met(self) -> bool:
        """Whether lanes draw in this turn: a tree is wanted of a draft, drafts read nothing that
        the device has yet to write, and no sequence is to come to a draft or to leave one, which
        they do between planned steps."""
        assignments = self._attachments.assignments
        return (
            assignments.are_trees_wanted
            and self._are_features_known
            and not assignments.any_moves(self._scheduler.running, self._clock())
        )

    @property
    def _are_features_known(self) -> bool:
        """Whether lanes can keep what drafts read: features of one kind at most, which leave the
        device before a draft reads them."""
        drafts = self._attachments.drafts.live
        return len(self._wanted_features) <= 1 and all(each.is_elsewhere for each in drafts)

    @property
    def _wanted_features(self) -> dict[str, FeatureSpec]:
        """The features that drafts read, by key."""
        specs = (each.feature_spec for each in self._attachments.drafts.live)
        return {spec.key: spec for spec in specs if spec is not None}

    def _suits(self, sequence: Sequence) -> bool:
        """Whether a lane can do all that the request asks for."""
        assignment = self._attachments.assignments.get(sequence.sequence_id)
        wanted = sequence.request.draft_algorithm or ""
        algorithm = wanted if assignment is None else assignment.attachment.identity.algorithm
        return sequence.prediction is None and can_be_round(sequence.request, algorithm)


def _round(shape: TreeShape, trees: NextTrees) -> LaunchedRound:
    """Returns a round that is launched now."""
    rows = shape.num_draft_tokens
    return LaunchedRound(0.0, shape, rows, trees=trees.trees, offered=trees.offered)
