"""Steps of the engine: plan, launch, read, commit, tell. All of it on one thread.

The loop runs ahead: it launches a step before it has read the one before, whose tokens stay on the
device and are the inputs of the next. So the host's work hides behind the device's, and checks for
the end lag one step: a sequence that turns out to have ended has a row in flight, which is thrown
away. Where the next step depends on what the host makes of the last one (drafts, grammars), the
loop reads each step before it launches the next.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence

from services.target.attachment import Attachment, Offer
from services.target.attachments import Attachments
from services.target.committer import Committer
from services.target.device_rounds import DeviceRounds
from services.target.fallback import NgramFallback
from services.target.feature_feed import FeatureFeed
from services.target.feature_store import FeatureStores
from services.target.host_gap import HostGap
from services.target.launched_step import LaunchedStep
from services.target.launcher import Launcher
from services.target.miss_ladder import MissLadder
from services.target.request import EventSink, GenerationRequest, ModelLimits, Started
from services.target.round_steps import RoundSteps
from services.target.scheduler import Scheduler, StepPlan
from services.target.sequence import Sequence as TargetSequence
from services.target.speculation_controller import SpeculationController
from services.target.step_report import EngineGauges, StepReport
from services.target.subscriptions import Subscriptions
from services.target.verifier import VerificationMode, Verifier
from shared.errors import InvalidArgument, OutriderError, QueueFull
from shared.kv.leases import KvLeases
from shared.runtime.runner import ModelRunner
from shared.tokens import TokenTree

Clock = Callable[[], float]
logger = logging.getLogger(__name__)


class StepLoop:
    """Owns sequences, drafts, pages and features; see `Engine` for the arguments."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        leases: KvLeases,
        scheduler: Scheduler,
        verifier: Verifier,
        limits: ModelLimits,
        clock: Clock,
        on_step: Callable[[StepReport], None],
        overlaps: bool,
        fallback: NgramFallback | None,
        speculation: SpeculationController,
    ) -> None:
        self._limits = limits
        self._leases = leases
        self._scheduler = scheduler
        self._clock = clock
        self._on_step = on_step
        self._overlaps = overlaps
        config = runner.decoder.config
        stores = FeatureStores(
            num_slots=runner.pool.num_pages * runner.page_size,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            device=runner.device,
        )
        self._ladder = MissLadder(fallback)
        self.attachments = Attachments(self._ladder, speculation)
        # Appended to by other threads.
        self.offers: deque[Offer] = deque()
        self._features = FeatureFeed(stores, self.attachments.feature_needs, leases.page_size)
        self._subscriptions = Subscriptions()
        self._runner, self._verifier = runner, verifier
        self._launcher = Launcher(runner, verifier, self._features)
        self._committer = Committer(leases, self._subscriptions, self.attachments, self._ladder)
        self._rounds = RoundSteps(
            scheduler=scheduler,
            attachments=self.attachments,
            committer=self._committer,
            clock=clock,
            on_step=on_step,
            forget=self._forget,
            runs_ahead=overlaps,
        )
        self._ids = itertools.count(1)
        self._in_flight: LaunchedStep | None = None
        self._host_gap = HostGap()
        self._committed_s = 0.0
        self._reports: list[StepReport] = []

    def step(self) -> bool:
        """Launches a step, and reads and commits the one before, or both if the loop may not run
        ahead. Returns whether there was anything to do."""
        if self._rounds.step(self._settle):
            self._tell()
            self._report()
            return True
        now_s = self._clock()
        if not self._runs_ahead():  # a draft has attached since the launch
            self._settle()
        self.attachments.readiness.prepare(self._scheduler.running, now_s)
        plan = self._scheduler.plan(
            lambda sequence: self.attachments.readiness.is_ready(sequence, now_s),
            self._tree,
        )
        self._announce(plan, now_s)
        last, self._in_flight = self._in_flight, None
        if plan.scheduled:
            self.attachments.readiness.begin_rounds(entry.sequence for entry in plan.drawn)
            self._in_flight = self._launcher.launch(plan, last, start_s=now_s)
            self._in_flight.host_gap_s = self._host_gap.launched(self._clock())
        is_timed = last is None or _are_alike(last, self._in_flight)
        if last is not None:
            self._commit(last)
        if not self._runs_ahead():
            self._settle()
        self._tell()
        self._end_step(now_s, is_timed=is_timed)
        was_busy = bool(plan.scheduled or plan.preempted or last is not None)
        if not was_busy:
            self._host_gap.wait()
        return was_busy

    def _tree(self, sequence: TargetSequence) -> TokenTree:
        """The tree for a sequence's current round: its draft's, else the target's own."""
        tree = self.attachments.assignments.candidate_tree(sequence)
        return tree if tree.token_ids else self._ladder.tree(sequence)

    def patience_s(self) -> float | None:
        """How long an engine with nothing ready may sleep; None until a command comes."""
        if not self._scheduler.num_running:
            self.check_idle()
            return None
        deadlines_s = map(self.attachments.readiness.deadline_s, self._scheduler.running)
        return max(min(deadlines_s) - self._clock(), 0.0)

    def admit(self, request: GenerationRequest, sink: EventSink, key: int) -> None:
        """Queues a request, or fails it: the queue is full, or it names an unknown algorithm."""
        sequence = TargetSequence.of(next(self._ids), request, self._limits)
        try:
            self.attachments.drafts.check_algorithm(request.draft_algorithm)
            self._scheduler.submit(sequence)
        except (InvalidArgument, QueueFull) as error:
            self._subscriptions.refuse(sink, key, error)
            return
        self._subscriptions.add(sequence, sink, key)

    def cancel(self, sink: EventSink, key: int) -> None:
        """Ends a request without a further event."""
        sequence = self._subscriptions.find(sink, key)
        if sequence is not None:
            sequence.cancel()
            self._forget(sequence)

    def attach(self, attachment: Attachment) -> None:
        """Adds a draft and hands it the sequences that have left the queue."""
        if attachment.feature_spec is not None:
            self._features.open(attachment.feature_spec)
        started = [sequence for sequence in self._subscriptions.sequences if sequence.started]
        self.attachments.attach(attachment, started, self._clock())
        self._open_rounds(attachment)

    def detach(self, attachment_id: str) -> None:
        """Forgets a draft."""
        self._rounds.close(self.attachments.detach(attachment_id, self._clock()))

    def take_offers(self) -> None:
        """Takes candidates that drafts pushed. Called before a step, and once more before its
        verdicts, so that what arrived during the forward is selected from."""
        while self.offers:
            self.attachments.intake.offer(self.offers.popleft())

    def release(self, attachment_id: str, sequence_ids: Sequence[int]) -> None:
        """Takes sequences back from a draft."""
        self.attachments.assignments.release(attachment_id, sequence_ids, self._clock())

    def gauges(self) -> EngineGauges:
        """Returns the live figures."""
        return EngineGauges(
            self._scheduler.num_waiting,
            self._scheduler.num_running,
            self._leases.num_pages,
            self._leases.num_free_pages,
            self._leases.num_cached_pages,
            self._leases.num_held_pages,
            self.attachments.assignments.num_drafted_for,
            self.attachments.assignments.num_paused,
            self.attachments.controller.budget.spent_s,
            self.attachments.controller.step_times.measured(),
        )

    def check_idle(self) -> None:
        """With nothing running every page is free or cached; anything else is our bug."""
        assert self._leases.num_held_pages == 0, f"{self._leases.num_held_pages} pages leaked"
        self._leases.check()

    def fail_all(self, error: OutriderError) -> None:
        """Fails every open request and ends every draft's stream."""
        self._subscriptions.fail_all(error)
        for attachment in self.attachments.drafts.live:
            attachment.port.close()

    def _announce(self, plan: StepPlan, now_s: float) -> None:
        """Announces sequences that leave the queue for the first time."""
        admitted = [sequence for sequence in plan.admitted if not sequence.started]
        for sequence in admitted:
            sequence.started = True
            sequence.decided_s = now_s
            sequence.num_cached_tokens = sequence.num_computed
            queue_s = now_s - sequence.request.arrival_s
            self._subscriptions.emit(sequence, Started(sequence.num_cached_tokens, queue_s))
        self._rounds.assign(admitted, now_s)

    def _open_rounds(self, attachment: Attachment) -> None:
        """Runs rounds on the device with the head of a draft that lends it."""
        source, spec = attachment.rounds, attachment.feature_spec
        is_coupled = self._verifier.mode is VerificationMode.COUPLED
        is_whole = self._runner.decoder.group is None
        if source is None or spec is None or not (is_coupled and is_whole):
            return
        store = self._features.kept(spec)
        assert store is not None
        algorithm = attachment.identity.algorithm
        rounds = DeviceRounds(source, self._runner, self._leases, store, algorithm)
        self._rounds.open(attachment, rounds)

    def _runs_ahead(self) -> bool:
        """Whether the step in flight may be left unread while the next one is launched."""
        if self._in_flight is None:
            return True
        depends_on_drafts = (
            self.attachments.assignments.needs_every_step or self._ladder.has_fallback
        )
        if not self._overlaps or depends_on_drafts:
            return False
        return self._in_flight.allows_run_ahead

    def _settle(self) -> None:
        """Reads and commits the step in flight, if there is one."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._commit(step)

    def _commit(self, step: LaunchedStep) -> None:
        """Reads a step and commits its tokens; those of sequences that have ended are dropped."""
        decided = step.read()
        self._tell_scores(step)
        if self._in_flight is None:
            self._host_gap.read(self._clock())
        live = [each for each in decided if each[0].sequence.finish_reason is None]
        self._launcher.keep_accepted(live)
        self.take_offers()
        now_s = self._clock()
        start_s, self._committed_s = max(step.start_s, self._committed_s), now_s
        num_committed = 0
        self._ladder.stepped(now_s - start_s)
        for entry, decision in live:
            num_committed += self._committer.commit(entry, decision, start_s, now_s)
            if entry.sequence.finish_reason is not None:
                self._forget(entry.sequence)
        for sequence in step.retired:
            self._scheduler.release(sequence)
        self._reports.append(
            StepReport(
                duration_s=now_s - start_s,
                host_gap_s=step.host_gap_s,
                num_rows=step.num_rows,
                num_prompt_rows=step.num_prompt_rows,
                num_rounds=len(live),
                num_committed=num_committed,
                num_drafted=sum(len(entry.tree) for entry, _ in live),
                num_accepted=sum(len(decision.accepted_nodes) for _, decision in live),
                num_preempted=len(step.plan.preempted),
                outcomes=self.attachments.outcomes.take(),
                speculation=self.attachments.controller.take_counts(),
                num_discarded=len(step.retired),
            )
        )

    def _end_step(self, start_s: float, *, is_timed: bool) -> None:
        """Accounts for what was committed since `start_s`; the time says how long it took only if
        `is_timed`."""
        self.attachments.end_step(self._reports, start_s, self._clock(), is_timed=is_timed)
        self._report()

    def _report(self) -> None:
        reports, self._reports = self._reports, []
        for report in reports:
            self._on_step(report)

    def _tell_scores(self, step: LaunchedStep) -> None:
        """Tells what a step says of prompt tokens, to those who have not left meanwhile."""
        if step.scores is not None:
            for sequence, event in step.scores.read():
                if sequence.finish_reason is None:
                    self._subscriptions.emit(sequence, event)

    def _tell(self) -> None:
        """Sends one message to each draft and one batch to each sink."""
        self._features.send()
        for attachment, message in self.attachments.drafts.take_messages():
            if not attachment.port.send(message):
                logger.warning("draft %s does not keep up", attachment.identity.worker_id)
                attachment.port.close()
                self.detach(attachment.identity.attachment_id)
        self._subscriptions.deliver()

    def _forget(self, sequence: TargetSequence) -> None:
        """Lets go of a sequence that has ended; its pages only when no step in flight has them."""
        self._subscriptions.remove(sequence)
        self._rounds.forget(sequence)
        self._scheduler.finish(sequence)
        self.attachments.assignments.close(sequence)
        self._ladder.forget(sequence)
        if self._in_flight is not None and self._in_flight.computes(sequence):
            self._in_flight.retired.append(sequence)
        else:
            self._scheduler.release(sequence)


def _are_alike(last: LaunchedStep, launched: LaunchedStep | None) -> bool:
    """Whether a turn that launches one step and commits the one before takes as long as either:
    on a CPU launching is computing, so that the time is the launched step's."""
    if launched is None:
        return False
    return (last.num_rows, last.num_prompt_rows) == (launched.num_rows, launched.num_prompt_rows)
