"""Lanes beside the planned steps: who gets one, the rounds of those who have, when each is
launched, and their commits."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from services.target.adaptive_config import ALWAYS_TREES, AdaptiveConfig
from services.target.committer import Committed, Committer
from services.target.drafts.attachment import Attachment, AttachmentStatus
from services.target.drafts.attachments import Attachments
from services.target.launcher import LaunchedStep
from services.target.rounds.device_rounds import DeviceRounds
from services.target.rounds.policy import LanePolicy
from services.target.scheduler import Scheduler
from services.target.sequence import Sequence
from services.target.step_report import Clock
from shared.tokens import Choice, TreeShape

logger = logging.getLogger(__name__)

# When the host launches a round, and how long it may sleep while one is under way.

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


@dataclass(frozen=True, slots=True)
class RoundStanding:
    """The choice in force, with its measurements.

    Attributes:
        shape: of the rounds under way; None while there are none.
        num_drafted_for: sequences that take part.
        num_paused: sequences that step plainly because that pays more.
        probe_s: time that probes have cost.
        round_s: usual time of a step, by choice and sequences.
    """

    shape: TreeShape | None
    num_drafted_for: int
    num_paused: int
    probe_s: float
    round_s: Mapping[tuple[Choice, int], float]


@dataclass(frozen=True, slots=True)
class _Launch:
    """A round that nobody has read.

    Attributes:
        num_tree_rows: that the target computes for a sequence.
        is_alone: nothing was planned beside it, and nobody joined.
    """

    start_s: float
    shape: TreeShape
    num_tree_rows: int
    is_alone: bool


FIRST_LATE_PAUSE_S, LAST_LATE_PAUSE_S = 0.1, 1.0
"""Time without trees after some that did not come; doubles while none come between."""
MIN_LANE_TOKENS = 2
"""A round starts from a computed token and one that is not."""
MAX_READING_SLOTS = 16
"""Slots of a round that read the ends of prompts; above, a step of their own is faster."""


class RoundSteps:
    """See `Lanes`. Owned by the engine thread.

    Args:
        make_rounds: returns rounds with an embedded draft's head; None where it shares none.
        forget: lets go of a sequence that has ended.
        runs_ahead: whether a round is launched before the last one is read.
        launches_late: whether that is put off until the last one is about to end.
        config: what may be chosen where no shape is pinned.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        attachments: Attachments,
        committer: Committer,
        clock: Clock,
        make_rounds: Callable[[Attachment], DeviceRounds | None],
        forget: Callable[[Sequence], None],
        runs_ahead: bool,
        launches_late: bool,
        config: AdaptiveConfig,
    ) -> None:
        self._config = config
        self._launches_late = launches_late
        self._wait, self._times = RoundWait(), DeviceTimes()
        self._scheduler = scheduler
        self._attachments = attachments
        self._committer = committer
        self._clock = clock
        self._make_rounds = make_rounds
        self._forget = forget
        self._max_unread = int(runs_ahead)
        self._rounds: DeviceRounds | None = None
        self._attachment: Attachment | None = None
        self._policy: LanePolicy | None = None
        self._is_plain = False
        # Slots of this turn's round that read the end of a prompt, by sequence.
        self._reading: dict[int, int] = {}
        self._launched: deque[_Launch] = deque()
        self._last_shape: Choice = None
        self._is_alone = True
        self._resumes_s, self._pause_s = -math.inf, FIRST_LATE_PAUSE_S

    def open(self, attachment: Attachment) -> None:
        """A draft attached; if it shares its head, sequences get lanes from now on."""
        rounds = self._make_rounds(attachment)
        if rounds is None:
            return
        self._attachment, self._rounds, self._policy = attachment, rounds, None
        if not rounds.is_pinned or len(rounds.shapes) > 1:
            config = ALWAYS_TREES if rounds.is_pinned else self._config
            self._policy = LanePolicy(rounds.shapes, rounds.measured(), config)
        rounds.warmed_up()

    @property
    def is_open(self) -> bool:
        """Whether there are lanes: a draft's model takes part in rounds."""
        return self._rounds is not None

    def close(self, attachment: Attachment | None) -> None:
        """A draft has left, perhaps the one whose head the rounds have."""
        if self._rounds is not None and attachment is self._attachment:
            self.settle()
            self._rounds.close()
            self._attachment = self._rounds = self._policy = None
            self._is_plain = False

    def choose(self, settle: Callable[[], None]) -> None:
        """A turn of the loop begins: decides whether lanes draw in it, and trees of which shape.

        Args:
            settle: reads and commits the planned step in flight.
        """
        rounds, self._is_plain = self._rounds, False
        self._reading = {}
        if rounds is None:
            return
        running = self._scheduler.running
        suited = [each for each in running if rounds.holds(each) or rounds.suits(each)]
        if not suited:
            return
        shape = None if self._is_head_late(rounds) else self._choose(rounds, suited)
        if shape is None:
            self._is_plain = True
            self.settle()
            self._close_assignments(suited)
            return
        if rounds.is_sparse or not rounds.keeps_lanes(shape):
            settle()
            self.settle()
        rounds.turn_to(shape)

    def _is_head_late(self, rounds: DeviceRounds) -> bool:
        """Whether sequences step plainly because trees did not come in time; they join rounds again
        after a while."""
        if rounds.is_late:
            now_s = self._clock()
            is_again = now_s < self._resumes_s + LAST_LATE_PAUSE_S
            pause_s = 2.0 * self._pause_s if is_again else FIRST_LATE_PAUSE_S
            self._pause_s = min(pause_s, LAST_LATE_PAUSE_S)
            self._resumes_s = now_s + self._pause_s
            logger.info("trees did not come in time: plain steps for %g s", self._pause_s)
            self.settle()
            rounds.forgive()
        return self._clock() < self._resumes_s

    def until_launch_s(self) -> float:
        """Returns the seconds until the next round has to be queued behind the one under way; 0
        where that is now. A sequence that arrives until then has its prompt read before it."""
        rounds, running = self._rounds, self._scheduler.running
        if rounds is None or not (self._launches_late and self._launched):
            return 0.0
        if self._scheduler.may_admit or not all(map(rounds.holds, running)):
            return 0.0
        began_s = self._times.began_s(self._launched[0].start_s)
        return self._wait.until_launch_s(self._clock() - began_s)

    def covers_launch(self, step: LaunchedStep) -> bool:
        """Whether a planned step takes the device longer than a round behind it the host."""
        if self._rounds is None or self._is_plain or not self._launches_late:
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
            assert self._policy is not None
            self._policy.observe_time(None, step.num_rows, seconds)
        took_s = self._times.read(step.start_s, now_s, is_awaited=is_awaited)
        if took_s is not None:
            self._wait.planned_timed(step.num_rows, took_s)

    def _is_plain_decode(self, step: LaunchedStep) -> bool:
        """Whether a planned step, which is about to be read, is what the policy calls a plain step:
        a token for everybody, and nothing else."""
        rounds, is_behind = self._rounds, self._times.is_behind(step.start_s)
        if self._policy is None or rounds is None or rounds.num_placed or not is_behind:
            return False
        return step.num_rows == len(step.drawn) == self._scheduler.num_running

    def join(self) -> None:
        """Gives lanes to sequences whose prompts are read, while the device computes something:
        their heads catch up, which takes the host longer than to launch a round."""
        rounds = self._rounds
        if rounds is not None and not self._is_plain:
            rounds.join(self._joining(rounds))

    def holds(self, sequence: Sequence) -> bool:
        """See `Lanes`."""
        return self._rounds is not None and self._rounds.holds(sequence)

    def takes(self, sequence: Sequence) -> bool:
        """Whether a sequence has a lane here, or may get one."""
        rounds = self._rounds
        return rounds is not None and (rounds.holds(sequence) or rounds.suits(sequence))

    def num_taken(self, sequence: Sequence) -> int:
        """See `Lanes`. A round reads the end of a prompt while there are slots for it. Otherwise
        the planned step that reads it draws the first token, too, a round earlier."""
        rounds = self._rounds
        if rounds is None or self._is_plain or len(sequence.token_ids) < MIN_LANE_TOKENS:
            return 0
        if not (rounds.suits(sequence) and rounds.num_free > 0):
            return 0
        num_slots = self._reading.get(sequence.sequence_id)
        if num_slots is None:
            num_slots = rounds.num_slots_to_read(sequence)
            most = min(MAX_READING_SLOTS, rounds.num_free)
            if not num_slots or sum(self._reading.values()) + num_slots > most:
                return int(sequence.num_uncomputed == 1)
            self._reading[sequence.sequence_id] = num_slots
        return sequence.num_uncomputed

    def evict(self, sequence: Sequence) -> None:
        """See `Lanes`."""
        rounds = self._rounds
        assert rounds is not None
        self._drain(rounds)
        if rounds.holds(sequence):
            rounds.evict(sequence)

    def launch(self, *, is_alone: bool) -> bool:
        """Launches a round of all lanes, those included that sequences get now; returns whether
        anything was done.

        Args:
            is_alone: no planned step is under way.
        """
        rounds = self._rounds
        if rounds is None or self._is_plain:
            return False
        joining = self._joining(rounds)
        rounds.join(joining)
        if not rounds.num_placed or self._all_end(rounds):
            return bool(joining)  # who was refused steps plainly from the next turn on
        self._is_alone = is_alone and not rounds.has_joined
        if not self._launch(rounds):
            self._drain(rounds)
            self._launch(rounds)
        return True

    def commit(self, *, drains: bool = False) -> bool:
        """Reads and commits the rounds that are due; returns whether there were any.

        Args:
            drains: all are.
        """
        rounds = self._rounds
        if rounds is None or not rounds.num_pending:
            return False
        num_before = rounds.num_pending
        while rounds.num_pending > self._max_unread:
            self._commit(rounds)
        if drains or self._all_end(rounds):
            self._drain(rounds)
        return rounds.num_pending < num_before

    def _joining(self, rounds: DeviceRounds) -> list[Sequence]:
        """Returns who gets a lane now: the last token is read, and what is not computed of those
        before it a round can compute."""
        joining: list[Sequence] = []
        num_others = 0  # with one slot each
        for each in self._scheduler.running:
            if each.num_pending or not each.num_computed or self._scheduler.lanes.holds(each):
                continue
            if each.num_uncomputed > self.num_taken(each):
                continue
            is_reading = each.sequence_id in self._reading
            # One that the plan did not ask for is in `_reading` only since the line above.
            if num_others + (not is_reading) + sum(self._reading.values()) > rounds.num_free:
                self._reading.pop(each.sequence_id, None)
                continue
            num_others += not is_reading
            self._attachments.assignments.close(each)
            joining.append(each)
        return joining

    def _launch(self, rounds: DeviceRounds) -> bool:
        num_before, now_s = rounds.num_pending, self._clock()
        was_taken = rounds.launch()
        launched_s = self._clock()
        if rounds.awaits_masks:
            self._drain(rounds)
            num_before = 0
            rounds.finish()
        if rounds.num_pending > num_before:
            shape = rounds.shape
            if shape != self._last_shape:  # nothing was prepared for it
                shape = replace(shape, is_ahead=False)
            self._last_shape = rounds.shape
            self._launched.append(_Launch(now_s, shape, rounds.num_tree_rows, self._is_alone))
            self._wait.launched(launched_s - now_s)
        return was_taken

    def _choose(self, rounds: DeviceRounds, suited: SequenceOf[Sequence]) -> TreeShape | None:
        """Returns the shape of the next round; None to step plainly instead."""
        shapes, policy = rounds.shapes_for(len(suited)), self._policy
        if policy is None:
            return shapes[0] if shapes else rounds.shape
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

    def settle(self) -> None:
        """Reads and commits every round under way, and takes all lanes from those who have them."""
        rounds = self._rounds
        if rounds is not None and rounds.is_running:
            self._drain(rounds)
            rounds.leave()

    @property
    def standing(self) -> RoundStanding:
        """The choice in force now, with its measurements."""
        policy, rounds = self._policy, self._rounds
        is_running = rounds is not None and rounds.is_running
        return RoundStanding(
            rounds.shape if rounds is not None and is_running else None,
            0 if rounds is None else rounds.num_placed,
            self._scheduler.num_running if self._is_plain else 0,
            0.0 if policy is None else policy.probe_s,
            {} if policy is None else policy.costs.measured(),
        )

    @property
    def pays(self) -> bool | None:
        """Whether rounds with trees are faster than plain steps; None while nothing is chosen."""
        return None if self._policy is None else self._policy.pays

    def comparison(self) -> str:
        """Returns the figures behind `pays`."""
        return "" if self._policy is None else self._policy.comparison()

    def told(self, status: AttachmentStatus) -> AttachmentStatus:
        """Returns what is told of a draft, with what rounds do in its place."""
        standing = self.standing
        is_idle = not standing.num_drafted_for + standing.num_paused
        if status.attachment is not self._attachment or is_idle:
            return status
        return replace(status, shape=standing.shape, num_paused=standing.num_paused)

    def assign(self, admitted: Iterable[Sequence], now_s: float) -> None:
        """Hands new sequences to drafts; where there are lanes, all those that no lane can have."""
        running = self.not_taken(self._scheduler.running)
        for sequence in admitted if self._rounds is None else running:
            self._attachments.assignments.assign(sequence, now_s)

    def not_taken(self, running: SequenceOf[Sequence]) -> SequenceOf[Sequence]:
        """Returns the sequences that no lane can have."""
        if self._rounds is None:
            return running
        return [each for each in running if not self.takes(each)]

    @property
    def is_under_way(self) -> bool:
        """Whether a round is launched that nobody has read."""
        return self._rounds is not None and self._rounds.num_pending > 0

    def forget(self, sequence: Sequence) -> None:
        """Lets go of a sequence that has ended; its pages are freed after this."""
        if self._rounds is not None:
            self._rounds.forget(sequence)

    def _all_end(self, rounds: DeviceRounds) -> bool:
        """Whether every sequence may end with the rounds under way: another one would be for
        nobody, and the next prompt would wait for it."""
        if rounds.has_joined:
            return False
        return all(each.num_remaining <= rounds.num_unread(each) for each in rounds.sequences)

    def _drain(self, rounds: DeviceRounds) -> None:
        while rounds.num_pending:
            self._commit(rounds)

    def _commit(self, rounds: DeviceRounds) -> None:
        """Reads the oldest round and commits it."""
        num_lanes, is_awaited = rounds.num_lanes, not rounds.is_done
        decided = rounds.read()
        now_s = self._clock()
        launch = self._launched.popleft()
        start_s = self._times.began_s(launch.start_s)
        # What trees that came too late cost says nothing of the shape.
        is_timed = launch.is_alone and self._times.is_behind(launch.start_s) and not rounds.is_late
        # Where all have ended before its draws, nobody took part.
        is_timed = is_timed and num_lanes > 0
        if self._policy is not None and is_timed:
            self._policy.observe_time(launch.shape, num_lanes, now_s - start_s)
        took_s = self._times.read(launch.start_s, now_s, is_awaited=is_awaited)
        if took_s is not None:
            self._wait.timed(took_s)
        if self._policy is not None:
            for is_greedy in (False, True):
                accepted = [
                    len(each.token_ids) - 1
                    for sequence, each in decided
                    if sequence.sampling.is_greedy is is_greedy and not _num_read(sequence)
                ]
                self._policy.observe(launch.shape, is_greedy=is_greedy, accepted=accepted)
        parts: list[Committed] = []
        num_prompt_rows = 0
        for sequence, each in decided:
            num_prompt_rows += _num_read(sequence)
            parts.append(self._committer.commit_round(sequence, each, now_s))
            if sequence.finish_reason is not None:
                self._forget(sequence)
        assert self._attachment is not None
        self._attachment.counters.num_verified_rounds += len(parts)
        self._attachment.counters.num_accepted += sum(each.num_accepted for each in parts)
        self._committer.report(
            parts,
            start_s,
            now_s,
            num_rows=launch.num_tree_rows * num_lanes,
            num_prompt_rows=num_prompt_rows,
            num_discarded=num_lanes - len(parts),
            round_shape=launch.shape,
        )


def _num_read(sequence: Sequence) -> int:
    """Returns how many prompt tokens the round computed, before it is committed, beside the last
    one."""
    return len(sequence.token_ids) - 1 - sequence.num_computed
