"""Rounds beside the planned steps: which sequences get lanes, when rounds are launched and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from services.target.committer import Committed, Committer
from services.target.drafts.attachments import Attachments
from services.target.rounds.lanes import RoundLanes
from services.target.scheduler import Scheduler
from services.target.sequence import Sequence
from services.target.step_report import Clock, HostGap
from shared.runtime.round_state import SequenceRound
from shared.tokens import Candidate, TokenTree, TreeShape

# How long the host may put off a launch, and sleep while a round is in flight.

POLL_S = 1e-4
"""Interval of the host's polls for the end of a round, once that is near."""
_SURE_SHARE = 0.9
_MARGIN_S = 5e-4
"""Time for a thread of the host to wake up."""
_DRIFT = 0.02
"""Share by which a remembered shortest time may rise with each new time."""


class DeviceTime(NamedTuple):
    """How long the device took for a round or a planned step; at most so long if not exact."""

    seconds: float
    is_exact: bool = True


class HostTime:
    """Estimates a time that most times of the host stay below, from their running mean and mean
    deviation, like a retransmission timer (RFC 6298). That timer adds four deviations; this one
    adds two, so that a few slow launches do not make all others early."""

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0

    def observe(self, seconds: float) -> None:
        """Takes one time."""
        distance_s = seconds - self._mean_s
        self._mean_s += distance_s / 8
        self._deviation_s += (abs(distance_s) - self._deviation_s) / 4

    @property
    def most_s(self) -> float:
        """The estimate, in seconds."""
        return self._mean_s + 2.0 * self._deviation_s


class RoundWait:
    """Remembers the shortest times of recent rounds and planned steps, and how long the host takes
    to plan a step and to launch a round."""

    def __init__(self) -> None:
        self._round_s = 0.0
        # By the bit length of the number of rows.
        self._planned_s: dict[int, float] = {}
        self._launch = HostTime()
        # By whether requests were admitted.
        self._planning = {False: HostTime(), True: HostTime()}

    def observe_round(self, took: DeviceTime) -> None:
        """Takes the time of a round."""
        self._round_s = _shortest_s(took, self._round_s)

    def observe_planned(self, num_rows: int, took: DeviceTime) -> None:
        """Takes the time of a planned step."""
        size = num_rows.bit_length()
        self._planned_s[size] = _shortest_s(took, self._planned_s.get(size, 0.0))

    def observe_launch(self, host_s: float) -> None:
        """Takes the time that the host needed for the launch of a round."""
        self._launch.observe(host_s)

    def observe_planning(self, host_s: float, *, is_admitting: bool) -> None:
        """Takes the time that the host needed to plan and launch a planned step, or to find that
        none was due.

        Args:
            is_admitting: requests were admitted.
        """
        self._planning[is_admitting].observe(host_s)

    def until_launch_s(
        self, elapsed_s: float, num_rows: int | None = None, *, is_admitting: bool = False
    ) -> float:
        """Returns for how long the next launch can be put off; 0 for not at all.

        Args:
            elapsed_s: time since the start of the round or step in front of it, or a little less.
            num_rows: rows of the planned step in front of it; None behind a round.
            is_admitting: requests will be admitted before it.
        """
        shortest_s = self._round_s
        if num_rows is not None:
            shortest_s = self._planned_s.get(num_rows.bit_length(), 0.0)
        last_s = shortest_s - _MARGIN_S - self._launch.most_s - self._planning[is_admitting].most_s
        return max(last_s - elapsed_s, 0.0)

    def sleep_s(self, elapsed_s: float) -> float:
        """Returns how long to sleep until the next poll for the end of a round.

        Args:
            elapsed_s: time since the start of the round in flight, or a little less.
        """
        return max(_SURE_SHARE * self._round_s - elapsed_s, POLL_S)


def _shortest_s(took: DeviceTime, previous_s: float) -> float:
    if not took.is_exact:
        return min(took.seconds, previous_s)
    return min(took.seconds, (previous_s or took.seconds) * (1.0 + _DRIFT))


class DeviceTimes:
    """Estimates when the device began and ended each round and planned step, in launch order.

    Attributes:
        end_s: when the host read the last one.
    """

    def __init__(self) -> None:
        self.end_s = 0.0
        self._was_awaited = False

    def began_s(self, launch_s: float) -> float:
        """Returns when the device began with the oldest unread work, or a little later.

        Args:
            launch_s: when that work was launched.
        """
        return max(launch_s, self.end_s)

    def is_behind(self, launch_s: float) -> bool:
        """Whether the oldest unread work was launched while other work was in flight. Its duration
        is then the time between the two reads, with the delays of a slow host."""
        return launch_s < self.end_s

    def read(self, launch_s: float, now_s: float, *, is_awaited: bool) -> DeviceTime:
        """Notes that work was read, and returns how long the device took for it.

        Args:
            is_awaited: the work was not done when the host began to read it.
        """
        is_exact = is_awaited and (self._was_awaited or launch_s >= self.end_s)
        began_s = self.began_s(launch_s) if is_exact else launch_s
        self.end_s, self._was_awaited = now_s, is_awaited
        return DeviceTime(now_s - began_s, is_exact)


@dataclass(slots=True, eq=False)
class LaunchedRound:
    """A round in flight: launched, and not read yet.

    Attributes:
        start_s: when it was launched; once it is read, when the device could begin with it.
        num_tree_rows: rows that the target computes for each sequence.
        is_alone: no step was planned beside it, and no sequence joined.
        is_timed: its time is that of its shape: it was launched behind other work, and the round
            before had the same shape.
        end_s: when it was read.
        host_gap_s: how long the device was idle before it, because of the host.
        trees: in rounds with pushed trees, the tree verified for each sequence that takes part. For
            sequences that are in the previous round too, it may be known only once that is read.
        offered: the candidates prepared for such sequences.
    """

    start_s: float
    shape: TreeShape
    num_tree_rows: int
    is_alone: bool = False
    is_timed: bool = True
    end_s: float = 0.0
    host_gap_s: float = 0.0
    trees: dict[int, TokenTree] = field(default_factory=dict)
    offered: Mapping[int, tuple[Candidate, ...]] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Time from when the device could begin with it to its read, once it is read."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of the engine that rounds share with planned steps.

    Attributes:
        host_gap: measures the idle time of the device between steps and rounds.
        forget: releases a sequence that has ended.
        runs_ahead: whether a round is launched before the previous one is read.
    """

    scheduler: Scheduler
    attachments: Attachments
    committer: Committer
    clock: Clock
    host_gap: HostGap
    forget: Callable[[Sequence], None]
    runs_ahead: bool


RoundResult = tuple[Sequence | None, SequenceRound]
"""The result of a round for a sequence; None stands for one that has ended since the launch."""
MIN_LANE_TOKENS = 2
"""A round starts from one computed and one uncomputed token."""
L = TypeVar("L", bound=RoundLanes)


class RoundSteps(ABC, Generic[L]):
    """Rounds of one kind of lanes; implements `Lanes`. Owned by the engine thread.

    Args:
        lanes: None while there are no lanes.
    """

    def __init__(self, lanes: L | None, parts: StepParts) -> None:
        self._lanes = lanes
        self._scheduler = parts.scheduler
        self._attachments = parts.attachments
        self._committer = parts.committer
        self._clock, self._host_gap = parts.clock, parts.host_gap
        self._forget = parts.forget
        self._runs_ahead = parts.runs_ahead
        self._wait, self._times = RoundWait(), DeviceTimes()
        self._launched: deque[LaunchedRound] = deque()
        # Whether lanes draw in this turn of the loop.
        self._draws = True
        # How many slots of this turn's round read the end of a prompt, by sequence.
        self._reading: dict[int, int] = {}

    @abstractmethod
    def num_taken(self, sequence: Sequence) -> int:
        """See `Lanes`."""

    @abstractmethod
    def _observe(
        self, round_: LaunchedRound, results: SequenceOf[RoundResult], took: DeviceTime
    ) -> None:
        """Takes the results of a round that was read, before they are committed.

        Args:
            took: time that the device needed.
        """

    @abstractmethod
    def _was_launched(self, round_: LaunchedRound, now_s: float) -> None:
        """Notes that a round is queued, at least up to its draws.

        Args:
            now_s: the time.
        """

    @abstractmethod
    def _commit_part(
        self, round_: LaunchedRound, sequence: Sequence, result: SequenceRound
    ) -> Committed:
        """Commits a sequence's part of a round."""

    @property
    def _drawing(self) -> L | None:
        """The lanes if they draw in this turn; None if all sequences take part in planned steps."""
        return self._lanes if self._draws else None

    @property
    def is_under_way(self) -> bool:
        """Whether a round is in flight."""
        return bool(self._launched)

    def holds(self, sequence: Sequence) -> bool:
        """See `Lanes`."""
        return self._lanes is not None and self._lanes.holds(sequence)

    def evict(self, sequence: Sequence) -> None:
        """See `Lanes`."""
        lanes = self._lanes
        assert lanes is not None
        self._drain(lanes)
        if lanes.holds(sequence):
            lanes.evict(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Releases a sequence that has ended. Its pages are freed after this."""
        if self._lanes is not None:
            self._lanes.forget(sequence)

    def settle(self) -> None:
        """Reads and commits all rounds in flight, and takes their lanes from all sequences."""
        lanes = self._lanes
        if lanes is not None and lanes.is_running:
            self._drain(lanes)
            lanes.leave()

    def _joining(self, lanes: L) -> list[Sequence]:
        """Returns the sequences that get a lane now: their last token is known, and a round can
        compute the tokens before it that are not computed."""
        joining: list[Sequence] = []
        num_decoding = 0  # with one slot each
        for sequence in self._scheduler.running:
            if lanes.holds(sequence) or self._scheduler.lanes.holds(sequence):
                continue
            if sequence.num_pending or not sequence.num_computed:
                continue
            if sequence.num_uncomputed > self.num_taken(sequence):
                continue
            # `num_taken` has just added it to `_reading`, if the plan had not asked before.
            is_reading = sequence.sequence_id in self._reading
            if num_decoding + (not is_reading) + sum(self._reading.values()) > lanes.num_free:
                self._reading.pop(sequence.sequence_id, None)
                continue
            num_decoding += not is_reading
            joining.append(sequence)
        return joining

    def _launch(self, lanes: L, round_: LaunchedRound) -> bool:
        """Launches a round of all lanes. If its draws wait for masks, reads the rounds before it.

        Returns:
            False where unread rounds have to be read first.
        """
        num_before = lanes.num_pending
        was_possible = lanes.launch()
        now_s = self._clock()
        self._was_launched(round_, now_s)
        round_.host_gap_s = self._host_gap.launched(now_s)
        self._launched.append(round_)
        if lanes.runner.awaits_masks:
            self._drain(lanes)
            num_before = 0
            lanes.finish()
        if lanes.num_pending == num_before:
            self._launched.pop()  # there was no memory, or no room
        return was_possible

    def _drain(self, lanes: L) -> None:
        while lanes.num_pending:
            self._commit(lanes)

    def _commit(self, lanes: L) -> None:
        """Reads the oldest round and commits it."""
        is_awaited = not lanes.runner.is_done
        results, round_ = lanes.read(), self._launched.popleft()
        launch_s, round_.end_s = round_.start_s, self._clock()
        round_.is_timed = round_.is_timed and self._times.is_behind(launch_s)
        round_.start_s = self._times.began_s(launch_s)
        took = self._times.read(launch_s, round_.end_s, is_awaited=is_awaited)
        self._observe(round_, results, took)
        parts: list[Committed] = []
        num_prompt_rows = num_discarded = 0
        for sequence, result in results:
            if sequence is None:
                num_discarded += bool(result.token_ids)
            elif result.token_ids:
                num_prompt_rows += num_read(sequence)
                parts.append(self._commit_part(round_, sequence, result))
                if sequence.finish_reason is not None:
                    self._forget(sequence)
        self._committer.report(
            parts,
            round_.start_s,
            round_.end_s,
            num_rows=round_.num_tree_rows * len(results),
            num_prompt_rows=num_prompt_rows,
            num_discarded=num_discarded,
            host_gap_s=round_.host_gap_s,
            round_shape=round_.shape,
        )


def num_read(sequence: Sequence) -> int:
    """Returns how many prompt tokens an uncommitted round computed for a sequence, without the last
    token."""
    return len(sequence.token_ids) - 1 - sequence.num_computed
