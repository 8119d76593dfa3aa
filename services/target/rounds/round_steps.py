"""Rounds beside the planned steps: who gets a lane, when each round is launched, and its commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.target.committer import Committed, Committer
from services.target.drafts.attachments import Attachments
from services.target.rounds.lanes import RoundLanes
from services.target.scheduler import Scheduler
from services.target.sequence import Sequence
from services.target.step_report import Clock
from shared.runtime.round_state import SequenceRound
from shared.tokens import Candidate, TokenTree, TreeShape

# How long the host may put off a launch, and sleep while a round is under way.

POLL_S = 1e-4
"""How often the host looks whether a round is done, once it is about to end."""
_SURE_SHARE = 0.9
_MARGIN_S = 1e-3
_HOST_SHARE = 1.5
_DRIFT = 0.02
"""What rounds may slow down by, one after the other, until the quickest is no measure any more."""


class RoundWait:
    """Remembers how quick rounds and planned steps have been lately, and how long the host takes to
    launch a round."""

    def __init__(self) -> None:
        self._quick_s = 0.0
        # By how many bits the number of rows has.
        self._planned_s: dict[int, float] = {}
        self._host_s = 0.0

    def timed(self, round_s: float) -> None:
        """A round took so long."""
        self._quick_s = _quick(round_s, self._quick_s)

    def planned_timed(self, num_rows: int, step_s: float) -> None:
        """A planned step took so long."""
        size = num_rows.bit_length()
        self._planned_s[size] = _quick(step_s, self._planned_s.get(size, 0.0))

    def launched(self, host_s: float) -> None:
        """The host took so long for a launch."""
        self._host_s = max(host_s, self._host_s * (1.0 - _DRIFT))

    def until_launch_s(self, elapsed_s: float, num_rows: int | None = None) -> float:
        """Returns how long the next round need not be launched yet; 0 for at once.

        Args:
            elapsed_s: since that began behind which it is launched, or a little less.
            num_rows: of a planned step; None behind a round.
        """
        quick_s = self._quick_s
        if num_rows is not None:
            quick_s = self._planned_s.get(num_rows.bit_length(), 0.0)
        last_s = _SURE_SHARE * quick_s - _MARGIN_S - _HOST_SHARE * self._host_s
        return max(last_s - elapsed_s, 0.0)

    def patience_s(self, elapsed_s: float) -> float:
        """Returns how long to sleep, unless something arrives.

        Args:
            elapsed_s: since the round under way began, or a little less.
        """
        return max(_SURE_SHARE * self._quick_s - elapsed_s, POLL_S)


def _quick(time_s: float, known_s: float) -> float:
    return min(time_s, (known_s or time_s) * (1.0 + _DRIFT))


class DeviceTimes:
    """Remembers when the device has done its work, piece by piece, as far as the host knows.

    Attributes:
        end_s: when the host read the last piece.
    """

    def __init__(self) -> None:
        self.end_s = 0.0
        self._was_awaited = False

    def began_s(self, launch_s: float) -> float:
        """Returns when the device began with the oldest piece that is not read, or a little later.

        Args:
            launch_s: when that was launched.
        """
        return max(launch_s, self.end_s)

    def is_behind(self, launch_s: float) -> bool:
        """Whether the oldest piece that is not read was launched while another one was under way:
        it has taken the time between their reads, that of a slow host included."""
        return launch_s < self.end_s

    def read(self, launch_s: float, now_s: float, *, is_awaited: bool) -> float | None:
        """Returns how long the device took for a piece; None where the host came too late to know.

        Args:
            is_awaited: it was not done when the host came.
        """
        is_known = is_awaited and (self._was_awaited or launch_s >= self.end_s)
        began_s = self.began_s(launch_s)
        self.end_s, self._was_awaited = now_s, is_awaited
        return now_s - began_s if is_known else None


@dataclass(slots=True, eq=False)
class LaunchedRound:
    """A round that nobody has read.

    Attributes:
        start_s: when it was launched; once it is read, when the device could begin with it.
        num_tree_rows: that the target computes for a sequence.
        is_alone: nothing was planned beside it, and nobody joined.
        end_s: when it was read.
        host_gap_s: how long the device had nothing to do before, because of the host.
        trees: of rounds with pushed trees, what is verified of each sequence that takes part, as
            far as that is known: of those that wait for the end of the round before, once that was
            read.
        offered: what was prepared for those.
    """

    start_s: float
    shape: TreeShape
    num_tree_rows: int
    is_alone: bool = False
    end_s: float = 0.0
    host_gap_s: float = 0.0
    trees: dict[int, TokenTree] = field(default_factory=dict)
    offered: Mapping[int, tuple[Candidate, ...]] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Time since the device could begin with it, once it is read."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class StepParts:
    """What rounds share with planned steps.

    Attributes:
        forget: lets go of a sequence that has ended.
        runs_ahead: whether a round is launched before the last one is read.
    """

    scheduler: Scheduler
    attachments: Attachments
    committer: Committer
    clock: Clock
    forget: Callable[[Sequence], None]
    runs_ahead: bool


RoundResult = tuple[Sequence | None, SequenceRound]
"""What a round did to a sequence; None stands for one that has ended since the launch."""
MIN_LANE_TOKENS = 2
"""A round starts from a computed token and one that is not."""
L = TypeVar("L", bound=RoundLanes)


class RoundSteps(ABC, Generic[L]):
    """See `Lanes`. Owned by the engine thread.

    Args:
        lanes: None while there are none.
    """

    def __init__(self, lanes: L | None, parts: StepParts) -> None:
        self._lanes = lanes
        self._scheduler = parts.scheduler
        self._attachments = parts.attachments
        self._committer = parts.committer
        self._clock = parts.clock
        self._forget = parts.forget
        self._runs_ahead = parts.runs_ahead
        self._wait, self._times = RoundWait(), DeviceTimes()
        self._launched: deque[LaunchedRound] = deque()
        # Whether lanes draw in this turn of the loop.
        self._draws = True
        # Slots of this turn's round that read the end of a prompt, by sequence.
        self._reading: dict[int, int] = {}

    @abstractmethod
    def num_taken(self, sequence: Sequence) -> int:
        """See `Lanes`."""

    @abstractmethod
    def _observe(
        self, round_: LaunchedRound, results: SequenceOf[RoundResult], took_s: float | None
    ) -> None:
        """A round was read, and is committed next.

        Args:
            took_s: that the device needed; None where the host came too late to know.
        """

    @abstractmethod
    def _commit_part(
        self, round_: LaunchedRound, sequence: Sequence, result: SequenceRound
    ) -> Committed:
        """Commits a sequence's part of a round."""

    @property
    def _drawing(self) -> L | None:
        """The lanes where they draw in this turn; None where everybody steps beside them."""
        return self._lanes if self._draws else None

    @property
    def is_under_way(self) -> bool:
        """Whether a round is launched that nobody has read."""
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
        """Lets go of a sequence that has ended; its pages are freed after this."""
        if self._lanes is not None:
            self._lanes.forget(sequence)

    def settle(self) -> None:
        """Reads and commits every round under way, and takes all lanes from those who have them."""
        lanes = self._lanes
        if lanes is not None and lanes.is_running:
            self._drain(lanes)
            lanes.leave()

    def _joining(self, lanes: L) -> list[Sequence]:
        """Returns who gets a lane now: the last token is read, and what is not computed of those
        before it a round can compute."""
        joining: list[Sequence] = []
        num_others = 0  # with one slot each
        for each in self._scheduler.running:
            if lanes.holds(each) or each.num_pending or not each.num_computed:
                continue
            if self._scheduler.lanes.holds(each) or each.num_uncomputed > self.num_taken(each):
                continue
            is_reading = each.sequence_id in self._reading
            # One that the plan did not ask for is in `_reading` only since the line above.
            if num_others + (not is_reading) + sum(self._reading.values()) > lanes.num_free:
                self._reading.pop(each.sequence_id, None)
                continue
            num_others += not is_reading
            joining.append(each)
        return joining

    def _launch(self, lanes: L, round_: LaunchedRound) -> bool:
        """Launches a round of all lanes, and reads those before it where its draws wait for masks.

        Returns:
            False where rounds that are unread have to be read first.
        """
        num_before = lanes.num_pending
        was_taken = lanes.launch()
        self._was_launched(round_)
        self._launched.append(round_)
        if lanes.runner.awaits_masks:
            self._drain(lanes)
            num_before = 0
            lanes.finish()
        if lanes.num_pending == num_before:
            self._launched.pop()  # there was no memory, or no room
        return was_taken

    def _was_launched(self, round_: LaunchedRound) -> None:
        """A round is queued up to its draws."""
        self._wait.launched(self._clock() - round_.start_s)

    def _drain(self, lanes: L) -> None:
        while lanes.num_pending:
            self._commit(lanes)

    def _commit(self, lanes: L) -> None:
        """Reads the oldest round and commits it."""
        is_awaited = not lanes.runner.is_done
        results, round_ = lanes.read(), self._launched.popleft()
        launch_s, round_.end_s = round_.start_s, self._clock()
        round_.is_alone = round_.is_alone and self._times.is_behind(launch_s)
        round_.start_s = self._times.began_s(launch_s)
        took_s = self._times.read(launch_s, round_.end_s, is_awaited=is_awaited)
        self._observe(round_, results, took_s)
        parts: list[Committed] = []
        num_prompt_rows = num_gone = 0
        for sequence, each in results:
            if sequence is None:
                num_gone += bool(each.token_ids)
            elif each.token_ids:
                num_prompt_rows += num_read(sequence)
                parts.append(self._commit_part(round_, sequence, each))
                if sequence.finish_reason is not None:
                    self._forget(sequence)
        self._committer.report(
            parts,
            round_.start_s,
            round_.end_s,
            num_rows=round_.num_tree_rows * len(results),
            num_prompt_rows=num_prompt_rows,
            num_discarded=num_gone,
            host_gap_s=round_.host_gap_s,
            round_shape=round_.shape,
        )


def num_read(sequence: Sequence) -> int:
    """Returns how many prompt tokens a round computed, before it is committed, beside the last
    one."""
    return len(sequence.token_ids) - 1 - sequence.num_computed
