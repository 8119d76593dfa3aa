"""Steps of the engine: plan, launch, read, commit, tell. All of it on one thread.

The loop runs ahead: it launches a step before it has read the one before, whose tokens stay on the
device and are the inputs of the next. So the host's work hides behind the device's, and checks for
the end lag one step: a sequence that turns out to have ended has a row in flight, which is thrown
away. Where the next step depends on what the host makes of the last one (drafts, grammars), the
loop reads each step before it launches the next. Drafts are told of the last one at once, since the
next may wait for them; its tokens go out behind the launch, while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable

from services.target.adaptive_config import DEFAULT_CONFIG, AdaptiveConfig
from services.target.committer import Committer
from services.target.drafts.attachment import Attachment, AttachmentStatus
from services.target.drafts.attachments import Attachments
from services.target.drafts.draft_exchange import DraftExchange
from services.target.drafts.draft_policy import ALWAYS
from services.target.drafts.feature_store import FeatureFeed, FeatureSpec
from services.target.engine_gauges import EngineGauges
from services.target.fallback import NgramFallback, own_tree
from services.target.launcher import LaunchedStep, Launcher
from services.target.requests.event_stream import Subscriptions
from services.target.requests.request import EventSink, ModelLimits
from services.target.rounds.head_rounds import HeadSteps
from services.target.rounds.pushed_rounds import PushedSteps, Turn
from services.target.rounds.round_factory import RoundFactory
from services.target.rounds.round_steps import StepParts
from services.target.scheduler import AllLanes, Scheduler
from services.target.sequence import Sequence as TargetSequence
from services.target.speculation_state import SpeculationState
from services.target.step_report import Clock, HostGap, StepReport
from services.target.verifier import Verifier
from services.target.weight_control import MemoryTag, MovableMemory, WeightControl, WeightVersion
from shared.errors import OutriderError
from shared.kv.leases import KvLeases
from shared.models.weight_update import named_tensors
from shared.runtime.host_copy import DeviceMark
from shared.runtime.round_runner import RoundLimits
from shared.runtime.runner import ModelRunner
from shared.tokens import TokenTree


class StepLoop:
    """Owns sequences, drafts, pages and features.

    Args:
        runner: runs forwards of the target model and owns the KV pool.
        leases: owners of that pool's pages.
        clock: seconds, monotonic.
        on_step: called after each step on the engine thread.
        overlaps: whether steps are launched before the last one is read, where they can be.
        fallback: drafts where no draft does; None where nobody should.
        always_up_to: sequences that want trees of every draft, whatever they bring.
        adaptive: trees to choose from, where no shape is pinned; None leaves remote drafts their
            own shape.
        selection: of rounds on the device with trees that remote drafts push; None has none.
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
        fallback: NgramFallback | None = None,
        always_up_to: int = ALWAYS,
        adaptive: AdaptiveConfig | None = None,
        selection: RoundLimits | None = None,
    ) -> None:
        self.runner, self.leases, self.limits, self.clock = runner, leases, limits, clock
        self._scheduler = scheduler
        self._on_step = on_step
        self._overlaps = overlaps
        config = runner.decoder.config
        self._fallback = fallback
        self.attachments = Attachments(adaptive, always_up_to=always_up_to)
        self._features = FeatureFeed(
            self.attachments.assignments,
            leases,
            num_slots=runner.pool.num_leased_pages * runner.page_size,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            device=runner.device,
            are_files=selection is not None and runner.device.type == "cpu",
        )
        self._subscriptions = Subscriptions(limits, scheduler, self.attachments.drafts)
        self.submit = self._subscriptions.submit  # of requests, on this thread
        self._launcher = Launcher(runner, verifier, self._features)
        version = WeightVersion()
        routes = FeatureSpec.of_routes(limits.num_routes) if limits.num_routes else None
        if routes is not None:
            self._features.open(routes)
        self._committer = Committer(
            leases=leases,
            subscriptions=self._subscriptions,
            attachments=self.attachments,
            has_fallback=fallback is not None,
            version=version,
            features=self._features,
            routes=routes,
            clock=clock,
            forget=self._forget,
            release=scheduler.release,
        )
        factory = RoundFactory(
            runner,
            verifier,
            leases,
            self._features,
            selection,
            adaptive or DEFAULT_CONFIG,
        )
        parts = StepParts(
            scheduler, self.attachments, self._committer, clock, self._forget, overlaps
        )
        self._rounds = HeadSteps(
            parts,
            factory.head_lanes,
            factory.config,
            launches_late=runner.computes_aside,
        )
        self.speculation = SpeculationState(self.attachments, self._rounds)
        self._host_gap = HostGap()
        # A target with trees of its own decides between two steps which to verify.
        self._pushed = PushedSteps(
            None if fallback else factory.pushed_lanes(),
            parts,
            has_other_lane=self._rounds.takes,
            features=self._features,
            host_gap=self._host_gap,
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
        # Rows of prompts that were planned since the last round, while the next one is put off.
        self._num_put_off = 0
        self.weights = WeightControl(
            decoder=runner.decoder,
            leases=leases,
            scheduler=scheduler,
            subscriptions=self._subscriptions,
            version=version,
            quiesce=self._quiesce,
            drop=self._forget,
            unplace=self._unplace,
            memory=MovableMemory(
                {
                    MemoryTag.KV_CACHE: [runner.pool.storage],
                    MemoryTag.WEIGHTS: [each for _, each in named_tensors(runner.decoder)],
                },
                is_movable=not runner.has_graphs and runner.decoder.group is None,
            ),
        )
        self.weights.followers.append(self.drafts.weights_updated)
        self._planned = DeviceMark(runner.device)

    def step(self) -> bool:
        """Launches a step, and reads and commits the one before, or both if the loop may not run
        ahead. Returns whether there was anything to do."""
        if self.weights.is_paused:
            self._tell()  # what commands have left
            return False
        if self._until_launch_s() > 0.0:
            self._subscriptions.deliver()  # what commands have left
            return False
        self._rounds.choose(self._settle)
        self._pushed.choose()
        now_s = self.clock()
        self.speculation.update(now_s)
        turn = self._pushed.step()
        if turn is Turn.DONE or self._committer.reports:
            self._tell()
            self._report()
            now_s = self.clock()  # a planned step begins behind that
        if turn is Turn.NO_LANES or self._has_others:
            return self._step(now_s, is_aside=turn is not Turn.NO_LANES) or turn is Turn.DONE
        self._subscriptions.deliver()  # what commands have left
        return turn is Turn.DONE

    @property
    def _has_others(self) -> bool:
        """Whether a step is to be planned beside lanes whose trees drafts push: a sequence has no
        lane yet, or waits, and the device is done with the last such step."""
        if self._in_flight is None and not self._planned.is_passed:
            return False
        lanes, running = self._scheduler.lanes, self._scheduler.running
        is_any = self._in_flight is not None or self._scheduler.may_admit
        return is_any or not all(map(lanes.holds, running))

    def _step(self, now_s: float, *, is_aside: bool) -> bool:
        """A planned step of prompts and of whoever has no lane, then a round of the lanes.

        Args:
            is_aside: lanes whose trees drafts push have had their part of the turn.
        """
        others = self._rounds.not_taken(self._scheduler.running)
        if is_aside:
            others = [each for each in others if not self._scheduler.lanes.num_taken(each)]
            others = [each for each in others if not self._scheduler.lanes.holds(each)]
        else:
            self.attachments.readiness.begin_turn(others, now_s)
        if not self._runs_ahead():  # a draft has attached since the launch, or is asked again
            self._settle()
        if not is_aside or others:
            decoding = [each for each in others if each.num_uncomputed == 1]
            self.attachments.readiness.hold_trees(decoding, now_s)
        plan = self._scheduler.plan(
            lambda sequence: self.attachments.readiness.is_ready(sequence, now_s),
            self._tree,
        )
        if plan.admitted:
            running = self._rounds.not_taken(self._scheduler.running)
            self.attachments.readiness.update_policies(running, now_s)
        self._rounds.assign(self._subscriptions.start(plan.admitted, now_s), now_s)
        if plan.admitted and not self.runner.computes_aside:
            self._subscriptions.deliver()  # on a CPU the launch computes the prompt
        last, self._in_flight = self._in_flight, None
        if plan.scheduled:
            self.attachments.readiness.begin_rounds(entry.sequence for entry in plan.drawn)
            self._in_flight = self._launcher.launch(plan, last, start_s=now_s)
            self._planned = self._in_flight.mark
            self._in_flight.host_gap_s = self._host_gap.launched(self.clock())
        has_round = self._launch_round(is_alone=last is None and not plan.scheduled)
        self._subscriptions.deliver()  # what the turn before left until the device computes
        if last is not None:
            self._commit(last)
            if last.num_prompt_rows:
                self._subscriptions.deliver()  # first tokens wait for no launch of a round
            self._rounds.join()
        if not self._runs_ahead():
            self._settle()
        has_round |= self._rounds.commit(drains=bool(self._num_put_off))
        self.drafts.send_messages()
        idle_s = 0.0 if is_aside else self._idle_s()
        is_computing = self._in_flight is not None or self._rounds.is_under_way
        if is_computing or not self.runner.computes_aside or idle_s > 0.0:
            self._subscriptions.deliver()  # what nothing is launched before waits for nothing
        self._report()
        was_busy = bool(plan.scheduled or plan.preempted or last is not None or has_round)
        if not was_busy and not is_aside:
            self._host_gap.wait()
        return was_busy

    def _tree(self, sequence: TargetSequence) -> TokenTree:
        """The tree for a sequence's current round: its draft's, else the target's own."""
        tree = self.attachments.assignments.tree(sequence)
        if tree.token_ids or (self._fallback is None and sequence.prediction is None):
            return tree
        return own_tree(sequence, self._fallback)

    def _report(self) -> None:
        """Hands out the reports of the steps that were committed."""
        for report in self._committer.reports:
            self._on_step(report)
        self._committer.reports.clear()

    def _idle_s(self) -> float:
        """Seconds for which every sequence awaits a draft; 0 if there is anything to do."""
        is_computing = (
            self._in_flight is not None or self._pushed.is_under_way or self._rounds.is_under_way
        )
        is_news = self._scheduler.may_admit or bool(self.drafts.offers)
        if is_computing or is_news or not self._scheduler.num_running:
            return 0.0
        return self._until_ready_s()

    def patience_s(self) -> float | None:
        """Seconds that an engine with nothing ready may sleep; None for until a command comes."""
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
        deadlines_s = map(self.attachments.readiness.deadline_s, self._scheduler.running)
        return max(min(deadlines_s) - self.clock(), 0.0)

    def _until_launch_s(self) -> float:
        """Seconds in which nothing has to be launched, because the device has enough to do."""
        if self._in_flight is None:
            return self._rounds.until_launch_s()
        if not self._num_put_off or self._scheduler.may_admit:
            return 0.0
        return self._rounds.until_launch_behind_s(self._in_flight)

    def _launch_round(self, *, is_alone: bool) -> bool:
        """Launches a round, unless that is put off until the planned step in flight is about to
        end. Requests that arrive until then have their prompts read before it, as far as one step
        could have taken them all.

        Args:
            is_alone: see `HeadSteps.launch`.
        """
        step, num_before, self._num_put_off = self._in_flight, self._num_put_off, 0
        if step is not None and step.num_prompt_rows and self._runs_ahead():
            num_rows = num_before + step.num_rows
            is_within = num_rows < self._scheduler.max_step_rows
            if is_within and self._rounds.covers_launch(step):
                self._num_put_off = num_rows
                return False
        return self._rounds.launch(is_alone=is_alone)

    def cancel(self, sink: EventSink, key: int) -> None:
        """Ends a request without a further event."""
        sequence = self._subscriptions.find(sink, key)
        if sequence is not None:
            sequence.cancel()
            self._forget(sequence)

    def attach(self, attachment: Attachment) -> None:
        """Adds a draft and hands it the sequences that have left the queue."""
        started = [sequence for sequence in self._subscriptions.sequences if sequence.started]
        self.drafts.attach(attachment, started)

    def gauges(self) -> EngineGauges:
        """Returns the live figures."""
        leases, rounds, policy = self.leases, self._rounds, self._rounds.policy
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
            probe_s=sum(each.trial_s for each in policies) + (policy.probe_s if policy else 0.0),
            speculates=self.attachments.pays is not False,
            round_shape=rounds.shape or self._pushed.shape,
            round_s={
                **{key: s for each in policies for key, s in each.times.measured().items()},
                **({} if policy is None else policy.costs.measured()),
            },
        )

    def statuses(self) -> tuple[AttachmentStatus, ...]:
        """Returns the drafts, oldest first, with what is wanted of them."""
        now_s, told = self.clock(), map(self._rounds.with_rounds, self.attachments.statuses())
        return tuple(self.speculation.explained(each, now_s) for each in told)

    def check_idle(self) -> None:
        """With nothing running every page is free or cached; anything else is our bug."""
        assert self.leases.num_held_pages == 0, f"{self.leases.num_held_pages} pages leaked"
        self.leases.check()

    def fail_all(self, error: OutriderError) -> None:
        """Fails every open request and ends every draft's stream."""
        self._subscriptions.fail_all(error)
        self.drafts.close()

    def _runs_ahead(self) -> bool:
        """Whether the step in flight may be left unread while the next one is launched."""
        if self._in_flight is None:
            return True
        if not self._overlaps or self._fallback is not None:
            return False
        if self.attachments.assignments.needs_every_step:
            return False
        return self._in_flight.allows_run_ahead

    def _quiesce(self) -> None:
        """Reads and commits everything that is launched, and tells what it has brought."""
        self._settle()
        self._rounds.settle()
        self._pushed.settle()
        self._tell()

    def _unplace(self, sequence: TargetSequence) -> None:
        """Takes a running sequence from its draft and from lanes, which know features and keys of
        other weights; a draft begins with it anew."""
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
        """Reads a step and commits its tokens; those of sequences that have ended are dropped."""
        is_awaited = not step.mark.is_passed
        decided = step.read()
        self._rounds.planned_read(step, is_awaited=is_awaited)
        if step.scores is not None:
            for sequence, event in step.scores.read():
                if sequence.finish_reason is None:
                    self._subscriptions.emit(sequence, event)
        if self._in_flight is None:
            self._host_gap.read(self.clock())
        live = [each for each in decided if each[0].sequence.finish_reason is None]
        self._launcher.keep_accepted(live)
        self.drafts.take_offers()
        self._committer.commit_step(step, live)

    def _tell(self) -> None:
        """Sends one message to each draft and one batch to each sink."""
        self.drafts.send_messages()
        self._subscriptions.deliver()

    def _forget(self, sequence: TargetSequence) -> None:
        """Lets go of a sequence that has ended; its pages only when no step in flight has them."""
        self.drafts.learners.ended(sequence)
        self._subscriptions.remove(sequence)
        self._rounds.forget(sequence)
        self._pushed.forget(sequence)
        self._scheduler.finish(sequence)
        self.attachments.assignments.close(sequence)
        if self._fallback is not None:
            self._fallback.forget(sequence)
        if self._in_flight is not None and self._in_flight.computes(sequence):
            self._in_flight.retired.append(sequence)
        else:
            self._scheduler.release(sequence)
