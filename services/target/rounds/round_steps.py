"""Steps of the loop that are rounds on the device, and the way into them and out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.target.clock import Clock
from services.target.committer import Committer
from services.target.drafts.attachment import Attachment
from services.target.drafts.attachments import Attachments
from services.target.rounds.device_rounds import DeviceRounds
from services.target.scheduler import Scheduler
from services.target.sequence import Sequence
from services.target.step_report import StepReport


class RoundSteps:
    """Takes the loop's step where it can be a round. Owned by the engine thread.

    Args:
        make_rounds: returns rounds with the head that a draft lends; None where it lends none.
        forget: lets go of a sequence that has ended.
        runs_ahead: whether a round is launched before the last one is read.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        attachments: Attachments,
        committer: Committer,
        clock: Clock,
        on_step: Callable[[StepReport], None],
        make_rounds: Callable[[Attachment], DeviceRounds | None],
        forget: Callable[[Sequence], None],
        runs_ahead: bool,
    ) -> None:
        self._scheduler = scheduler
        self._attachments = attachments
        self._committer = committer
        self._clock = clock
        self._on_step = on_step
        self._make_rounds = make_rounds
        self._forget = forget
        self._max_unread = int(runs_ahead)
        self._rounds: DeviceRounds | None = None
        self._attachment: Attachment | None = None
        self._committed_s = 0.0

    def open(self, attachment: Attachment) -> None:
        """A draft attached; if it lends its head, rounds take over when they can."""
        rounds = self._make_rounds(attachment)
        if rounds is not None:
            self._attachment, self._rounds = attachment, rounds

    def close(self, attachment: Attachment | None) -> None:
        """A draft has left, perhaps the one whose head the rounds have."""
        if self._rounds is not None and attachment is self._attachment:
            self.settle()
            self._attachment = self._rounds = None

    def step(self, settle: Callable[[], None]) -> bool:
        """Runs rounds instead of a step of the general path; False leaves it to that one.

        Args:
            settle: reads and commits the general path's step in flight.
        """
        rounds = self._rounds
        if rounds is None or not self._suits(rounds):
            self.settle()
            return False
        settle()
        if not self._suits(rounds):
            return False
        for sequence in self._scheduler.running:
            self._attachments.assignments.close(sequence)
        start_s = self._clock()
        if not self._all_end(rounds) and not rounds.launch(self._scheduler.running):
            self.settle()
            return False
        while rounds.num_pending > self._max_unread:
            self._commit(rounds, start_s)
        if self._all_end(rounds):
            self._drain(rounds, start_s)
        return True

    def settle(self) -> None:
        """Reads and commits every round under way, and leaves the sequences to the general
        path."""
        rounds = self._rounds
        if rounds is None or not rounds.is_running:
            return
        self._drain(rounds, self._clock())
        rounds.leave()

    def assign(self, admitted: Iterable[Sequence], now_s: float) -> None:
        """Hands new sequences to drafts; while rounds are to take all that run, none, and else
        those too that took part."""
        rounds, running = self._rounds, self._scheduler.running
        if rounds is not None:
            admitted = () if all(map(rounds.takes, running)) else running
        for sequence in admitted:
            self._attachments.assignments.assign(sequence, now_s)

    def forget(self, sequence: Sequence) -> None:
        """Lets go of a sequence that has ended; its pages are freed after this."""
        if self._rounds is not None:
            self._rounds.forget(sequence)

    def _suits(self, rounds: DeviceRounds) -> bool:
        return not self._scheduler.may_admit and rounds.suits(self._scheduler.running)

    def _all_end(self, rounds: DeviceRounds) -> bool:
        """Whether every sequence ends with the rounds under way, each of which commits a token."""
        running = self._scheduler.running
        return all(sequence.num_remaining <= rounds.num_pending for sequence in running)

    def _drain(self, rounds: DeviceRounds, start_s: float) -> None:
        while rounds.num_pending:
            self._commit(rounds, start_s)

    def _commit(self, rounds: DeviceRounds, start_s: float) -> None:
        """Reads the oldest round and commits it."""
        num_guests = rounds.num_guests
        decided = rounds.read()
        now_s = self._clock()
        start_s, self._committed_s = max(start_s, self._committed_s), now_s
        num_committed = num_accepted = 0
        for sequence, each in decided:
            count = self._committer.commit_round(sequence, each, now_s)
            num_committed += count
            num_accepted += min(len(each.token_ids) - 1, count)
            if sequence.finish_reason is not None:
                self._forget(sequence)
        assert self._attachment is not None
        self._attachment.counters.num_verified_rounds += len(decided)
        self._attachment.counters.num_accepted += num_accepted
        self._on_step(
            StepReport(
                duration_s=now_s - start_s,
                host_gap_s=0.0,
                num_rows=rounds.num_tree_rows * num_guests,
                num_prompt_rows=0,
                num_rounds=len(decided),
                num_committed=num_committed,
                num_drafted=sum(each.num_drafted for _, each in decided),
                num_accepted=num_accepted,
                num_preempted=0,
                outcomes=self._attachments.outcomes.take(),
                speculation=self._attachments.controller.take_counts(),
                num_discarded=num_guests - len(decided),
            )
        )
