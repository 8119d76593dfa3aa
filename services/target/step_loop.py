"""Steps of the engine: plan, launch, read, commit, send. All of it on one thread.

The loop runs ahead: it launches step N + 1 before it has read step N, whose tokens stay on the
device as inputs of step N + 1. So the host works while the device computes. Checks for the end of a
sequence lag one step: a sequence that has ended may have a row in flight, which is discarded. If
step N + 1 depends on what the host computes from step N (drafts, grammars), the loop reads step N
first. Drafts get the verdicts of step N at once, because step N + 1 may wait for them; the tokens
of step N are delivered after the launch of step N + 1, while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from services.target.adaptive_config import DEFAULT_CONFIG, AdaptiveConfig
from services.target.committer import Committer
from services.target.drafts.attachment import Attachment, AttachmentStatus
from services.target.drafts.attachments import Attachments
from services.target.drafts.draft_exchange import DraftExchange, SpeculationState
from services.target.drafts.draft_policy import ALWAYS
from services.target.drafts.feature_store import FeatureFeed, FeatureSpec
from services.target.launcher import LaunchedStep, Launcher
from services.target.requests.request import EventSink, ModelLimits
from services.target.rounds.head_rounds import HeadSteps
from services.target.rounds.pushed_rounds import PushedSteps, Turn
from services.target.rounds.round_factory import RoundFactory
from services.target.rounds.round_steps import StepParts
from services.target.scheduler import AllLanes, Scheduler, Subscriptions, narrowed
from services.target.sequence import Sequence as TargetSequence
from services.target.step_report import Clock, EngineGauges, HostGap, StepReport
from services.target.verifier import Verifier
from services.target.weight_control import MemoryTag, MovableMemory, WeightControl, WeightVersion
from shared.errors import OutriderError
from shared.kv.leases import KvLeases
from shared.models.weight_update import named_tensors
from shared.runtime.host_copy import DeviceMark
from shared.runtime.round_runner import RoundLimits
from shared.runtime.runner import ModelRunner
from shared.tokens import TokenTree

LONG_PROMPT_TOKENS = 128
"""The target takes longer to compute such a prompt on a CPU than a draft takes to read it and to
grow a tree, so drafts are told of it first. A draft that reads a shorter one would only be busy
when the target needs its first tree."""


class StepLoop:
    """Owns sequences, drafts, pages and features.

    Args:
        runner: runs forwards of the target model and owns the KV pool.
        leases: leases of that pool's pages.
        clock: seconds, monotonic.
        on_step: called after each step on the engine thread.
        overlaps: whether a step may be launched before the step before it is read.
        always_up_to: up to this many sequences, trees are requested even if plain steps are faster.
        adaptive: tree shapes to choose from, if none is pinned; None: remote drafts' own shapes.
        selection: limits of device rounds with remote drafts; None: no such rounds.
        maps_heads: drafts on this host may take part in them; others push trees.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        leases: KvLeases,
        scheduler: Scheduler,
        verifier: Verifier,
        limits: ModelLimits,
        clock: Clock,
        on_step: Callable[[StepReport], None] = lambda report: None,
        overlaps: bool = True,
        always_up_to: int = ALWAYS,
        adaptive: AdaptiveConfig | None = None,
        selection: RoundLimits | None = None,
        maps_heads: bool = True,
    ) -> None:
        self.runner, self.leases, self.limits, self.clock = runner, leases, limits, clock
        self._scheduler = scheduler
        self._on_step = on_step
        self._overlaps = overlaps
        config = runner.decoder.config
        self.attachments = Attachments(adaptive, always_up_to=always_up_to)
        self._features = FeatureFeed(
            self.attachments.assignments,
            leases,
            num_slots=runner.pool.num_leased_pages * runner.page_size,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            device=runner.device,
            are_files=selection is not None and maps_heads and runner.device.type == "cpu",
        )
        self._subscriptions = Subscriptions(limits, scheduler, self.attachments.drafts)
        self.submit = self._subscriptions.submit  # called on the engine thread
        self._launcher = Launcher(runner, verifier, self._features)
        version = WeightVersion()
        routes = FeatureSpec.of_routes(limits.num_routes) if limits.num_routes else None
        if routes is not None:
            self._features.open(routes)
        self._committer = Committer(
            leases=leases,
            subscriptions=self._subscriptions,
            attachments=self.attachments,
            version=version,
            features=self._features,
            routes=routes,
            clock=clock,
            forget=self._forget,
            release=scheduler.release,
        )
        factory = RoundFactory(
            *(runner, verifier, leases, self._features, selection, adaptive or DEFAULT_CONFIG),
            maps_heads=maps_heads,
        )
        self._host_gap = HostGap()
        parts = StepParts(
            scheduler,
            self.attachments,
            self._committer,
            clock,
            self._host_gap,
            self._forget,
            overlaps,
        )
        self._rounds = HeadSteps(
            parts, factory.head_lanes, factory.config, launches_late=runner.computes_aside
        )
        self.speculation = SpeculationState(self.attachments, self._rounds)
        self._pushed = PushedSteps(
            factory.pushed_lanes(),
            parts,
            has_other_lane=self._rounds.takes,
            features=self._features,
            take_offers=lambda: self.drafts.take_offers(),
        )
        self.drafts = DraftExchange(
            self.attachments,
            self._features,
            self._rounds,
            self._pushed,
            clock,
            runner.cache,
            version,
            factory,
        )
        scheduler.lanes = AllLanes(self._rounds, self._pushed)
        self._in_flight: LaunchedStep | None = None
        # Prompt rows planned since the last round, while the next round is postponed; else 0.
        self._num_postponed_rows = 0
        self.weights = WeightControl(
            decoder=runner.decoder,
            leases=leases,
            scheduler=scheduler,
            subscriptions=self._subscriptions,
            version=version,
            quiesce=self._quiesce,
            drop=self._forget,
            detach_sequence=self._detach_sequence,
            memory=MovableMemory(
                {
                    MemoryTag.KV_CACHE: [runner.pool.storage],
                    MemoryTag.WEIGHTS: [tensor for _, tensor in named_tensors(runner.decoder)],
                },
                is_movable=not runner.has_graphs and runner.decoder.group is None,
            ),
        )
        self.weights.followers.append(self.drafts.weights_updated)
        self._last_planned = DeviceMark(runner.device)

    def step(self) -> bool:
        """Launches a step, and reads and commits the one before it. If the loop may not run ahead,
        it commits the launched step as well. Returns whether there was anything to do."""
        if self.weights.is_paused:
            self._send_results()  # messages and events that commands have queued
            return False
        if self._until_launch_s() > 0.0:
            self._subscriptions.deliver()  # events that commands have queued
            return False
        self._rounds.choose(self._settle)
        self._pushed.choose()
        now_s = self.clock()
        self.speculation.update(now_s)
        turn = self._pushed.step()
        if turn is Turn.DONE or self._committer.reports:
            self._send_results()
            self._report()
            now_s = self.clock()  # a planned step begins after that work
        if turn is Turn.NO_LANES or self._needs_planned_step:
            beside_pushed = turn is not Turn.NO_LANES
            return self._planned_step(now_s, beside_pushed=beside_pushed) or turn is Turn.DONE
        self._subscriptions.deliver()  # events that commands have queued
        return turn is Turn.DONE

    @property
    def _needs_planned_step(self) -> bool:
        """Whether a planned step is due beside lanes with pushed trees: the last one is in flight,
        or is finished and a sequence may be admitted or runs without a lane."""
        if self._in_flight is None and not self._last_planned.is_passed:
            return False
        if self._in_flight is not None or self._scheduler.may_admit:
            return True
        return not all(map(self._scheduler.lanes.holds, self._scheduler.running))

    def _planned_step(self, now_s: float, *, beside_pushed: bool) -> bool:
        """Runs a planned step of prompts and of sequences without a lane, then a round of the lanes
        with a head. Returns whether there was anything to do.

        Args:
            beside_pushed: the lanes with pushed trees have had their part of the turn.
        """
        planned = self._rounds.not_taken(self._scheduler.running)
        if beside_pushed:
            lanes = self._scheduler.lanes
            planned = [sequence for sequence in planned if not lanes.num_taken(sequence)]
            planned = [sequence for sequence in planned if not lanes.holds(sequence)]
        else:
            self.attachments.readiness.begin_turn(planned, now_s)
        if not self._runs_ahead():  # a draft attached since the launch, or got requests again
            self._settle()
        if not beside_pushed or planned:
            decoding = [sequence for sequence in planned if sequence.num_uncomputed == 1]
            self.attachments.readiness.hold_trees(decoding, now_s)
        began_s = self.clock()
        plan = self._scheduler.plan(
            lambda sequence: self.attachments.readiness.is_ready(sequence, now_s), self._tree
        )
        if plan.admitted:
            running = self._rounds.not_taken(self._scheduler.running)
            self.attachments.readiness.update_policies(running, now_s)
        self._rounds.assign(self._subscriptions.start(plan.admitted, now_s), now_s)
        if plan.admitted and not self.runner.computes_aside:
            self._announce(plan.admitted)
        last, self._in_flight = self._in_flight, None
        if plan.scheduled:
            self.attachments.readiness.begin_rounds(entry.sequence for entry in plan.drawn)
            self._in_flight = self._launcher.launch(plan, last, start_s=now_s)
            self._last_planned = self._in_flight.mark
            self._in_flight.host_gap_s = self._host_gap.launched(self.clock())
        self._rounds.planned(self.clock() - began_s, is_admitting=bool(plan.admitted))
        has_round = self._launch_round(is_alone=last is None and not plan.scheduled)
        self._subscriptions.deliver()  # events of the turn before, kept until the device computes
        if last is not None:
            self._commit(last)
            if last.num_prompt_rows:
                self._subscriptions.deliver()  # first tokens do not wait for a round
            self._rounds.join()
        if not self._runs_ahead():
            self._settle()
        has_round |= self._commit_rounds()
        self.drafts.send_messages()
        idle_s = 0.0 if beside_pushed else self._idle_s()
        if self._is_computing or not self.runner.computes_aside or idle_s > 0.0:
            self._subscriptions.deliver()  # no launch comes first that these events should wait for
        self._report()
        was_busy = bool(plan.scheduled or plan.preempted or last is not None or has_round)
        if not was_busy and not beside_pushed:
            self._host_gap.wait()
        return was_busy

    def _announce(self, admitted: SequenceOf[TargetSequence]) -> None:
        """Tells clients and drafts of admitted sequences before the launch: on a CPU that computes
        their prompts."""
        self._subscriptions.deliver()
        if max(sequence.num_uncomputed for sequence in admitted) >= LONG_PROMPT_TOKENS:
            self.drafts.send_early()

    def _commit_rounds(self) -> bool:
        """Commits rounds of the lanes with a head; returns whether there were any to read."""
        has_read = self._rounds.commit(drains=bool(self._num_postponed_rows))
        if has_read:
            self._was_read()
        return has_read

    def _tree(self, sequence: TargetSequence) -> TokenTree:
        """Returns the tree for a sequence's current round, perhaps empty: of predicted text while
        the output follows that, else its draft's."""
        if sequence.prediction is None:
            return self.attachments.assignments.tree(sequence)
        tree = sequence.prediction.tree()
        return narrowed(tree, sequence.request.num_draft_tokens)[0]

    def _report(self) -> None:
        """Passes the reports of committed steps to `on_step`."""
        for report in self._committer.reports:
            self._on_step(report)
        self._committer.reports.clear()

    def _idle_s(self) -> float:
        """Returns how long every sequence still waits for its draft; 0 if there is any work."""
        is_computing = self._is_computing or self._pushed.is_under_way
        has_input = self._scheduler.may_admit or bool(self.drafts.offers)
        if is_computing or has_input or not self._scheduler.num_running:
            return 0.0
        return self._until_ready_s()

    def idle_timeout_s(self) -> float | None:
        """Returns how long an idle engine may sleep; None: until a command arrives."""
        round_s = self._pushed.sleep_s()
        if round_s is not None:
            return round_s
        until_launch_s = self._until_launch_s()
        if until_launch_s > 0.0:
            return until_launch_s
        if self.weights.is_paused:
            return None
        if not self._scheduler.num_running:
            self.check_idle()
            self.attachments.readiness.update_policies((), self.clock())
            return None
        return self._until_ready_s()

    def _until_ready_s(self) -> float:
        """Returns the seconds until the first running sequence stops waiting for its draft."""
        deadlines_s = map(self.attachments.readiness.deadline_s, self._scheduler.running)
        return max(min(deadlines_s) - self.clock(), 0.0)

    def _until_launch_s(self) -> float:
        """Returns the seconds until the next launch is due, while the device is busy; else 0."""
        if self._in_flight is None:
            return self._rounds.until_launch_s()
        if not self._num_postponed_rows:
            return 0.0
        return self._rounds.until_launch_behind_s(self._in_flight)

    def _launch_round(self, *, is_alone: bool) -> bool:
        """Launches a round, or postpones it until the planned step in flight is about to end.
        Requests that arrive until then have their prompts computed before it, up to `max_step_rows`
        rows in all. Returns whether there was anything to do.

        Args:
            is_alone: see `HeadSteps.launch`.
        """
        step, num_before, self._num_postponed_rows = self._in_flight, self._num_postponed_rows, 0
        if step is not None and step.num_prompt_rows and self._runs_ahead():
            num_rows = num_before + step.num_rows
            is_within = num_rows < self._scheduler.max_step_rows
            if is_within and self._rounds.covers_launch(step):
                self._num_postponed_rows = num_rows
                return False
        return self._rounds.launch(is_alone=is_alone)

    def cancel(self, sink: EventSink, key: int) -> None:
        """Ends a request without a further event."""
        sequence = self._subscriptions.find(sink, key)
        if sequence is not None:
            sequence.cancel()
            self._forget(sequence)

    def attach(self, attachment: Attachment) -> None:
        """Adds a draft and assigns it the sequences that have left the queue."""
        started = [sequence for sequence in self._subscriptions.sequences if sequence.started]
        self.drafts.attach(attachment, started)

    def gauges(self) -> EngineGauges:
        """Returns the live figures."""
        leases, rounds, round_policy = self.leases, self._rounds, self._rounds.policy
        assignments, policies = self.attachments.assignments, self.attachments.drafts.policies
        return EngineGauges(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_pages=leases.num_pages,
            num_free_pages=leases.num_free_pages,
            num_cached_pages=leases.num_cached_pages,
            num_held_pages=leases.num_held_pages,
            num_drafted_for=assignments.num_drafted_for + rounds.num_lanes,
            num_paused=assignments.num_paused + rounds.num_paused,
            probe_s=sum(policy.trial_s for policy in policies)
            + (round_policy.probe_s if round_policy else 0.0),
            speculates=self.attachments.pays is not False,
            round_shape=rounds.shape or self._pushed.shape,
            round_s={
                **{key: s for policy in policies for key, s in policy.times.measured().items()},
                **({} if round_policy is None else round_policy.costs.measured()),
            },
        )

    def statuses(self) -> tuple[AttachmentStatus, ...]:
        """Returns the drafts, oldest first, with their tree requests."""
        now_s, statuses = self.clock(), map(self._rounds.with_rounds, self.attachments.statuses())
        return tuple(self.speculation.explained(status, now_s) for status in statuses)

    def check_idle(self, *, is_thorough: bool = False) -> None:
        """Asserts that every page is free or cached, while no sequence runs.

        Args:
            is_thorough: asserts the invariants of every page, too, which takes milliseconds.
        """
        for leases in (self.leases, *self._rounds.head_leases):
            assert not leases.num_held_pages, f"{leases.num_held_pages} pages leaked"
            if is_thorough:
                leases.check()

    def fail_all(self, error: OutriderError) -> None:
        """Fails every open request and ends every draft's stream."""
        self._subscriptions.fail_all(error)
        self.drafts.close()

    def _runs_ahead(self) -> bool:
        """Whether the step in flight may be left unread while the next one is launched."""
        if self._in_flight is None:
            return True
        if not self._overlaps:
            return False
        if self.attachments.assignments.needs_every_step:
            return False
        return self._in_flight.allows_run_ahead

    @property
    def _is_computing(self) -> bool:
        """Whether a planned step, or a round of a head, is in flight."""
        return self._in_flight is not None or self._rounds.is_under_way

    def _was_read(self) -> None:
        """Notes the idle time of the device if nothing is in flight behind what was read."""
        if not self._is_computing:
            self._host_gap.read(self.clock())

    def draft_updated(self) -> None:
        """A draft has new weights: what its model computed before is not used again."""
        for leases in self._rounds.head_leases:
            leases.retire()

    def renew_policies(self) -> None:
        """Forgets what policies have observed."""
        self.attachments.drafts.renew_policies()
        self._rounds.renew_policy()

    def _quiesce(self) -> None:
        """Reads and commits every launched step and round, and sends the results."""
        self._settle()
        self._rounds.settle()
        self._pushed.settle()
        self._send_results()

    def _detach_sequence(self, sequence: TargetSequence) -> None:
        """Takes a sequence from its draft and from lanes, which hold features and KV of other
        weights; a draft starts over with it."""
        self._rounds.forget(sequence)
        self._pushed.forget(sequence)
        if self.attachments.assignments.get(sequence.sequence_id) is not None:
            self.attachments.assignments.close(sequence)
            self.attachments.assignments.assign(sequence, self.clock())

    def _settle(self) -> None:
        """Reads and commits the step in flight, if there is one."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._commit(step)

    def _commit(self, step: LaunchedStep) -> None:
        """Reads a step and commits its tokens; tokens of sequences that have ended are dropped."""
        is_awaited = not step.mark.is_passed
        decided = step.read()
        self._rounds.planned_read(step, is_awaited=is_awaited)
        if step.scores is not None:
            for sequence, event in step.scores.read():
                if sequence.finish_reason is None:
                    self._subscriptions.emit(sequence, event)
        self._was_read()
        live = [part for part in decided if part[0].sequence.finish_reason is None]
        self._launcher.keep_accepted(live)
        self.drafts.take_offers()
        self._committer.commit_step(step, live)

    def _send_results(self) -> None:
        """Sends one message to each draft and one batch to each sink."""
        self.drafts.send_messages()
        self._subscriptions.deliver()

    def _forget(self, sequence: TargetSequence) -> None:
        """Removes a sequence that has ended; steps in flight keep its pages until they are read."""
        self.drafts.learners.ended(sequence)
        self._subscriptions.remove(sequence)
        self._rounds.forget(sequence)
        self._pushed.forget(sequence)
        self._scheduler.finish(sequence)
        self.attachments.assignments.close(sequence)
        if self._in_flight is not None and self._in_flight.computes(sequence):
            self._in_flight.retired.append(sequence)
        else:
            self._scheduler.release(sequence)
