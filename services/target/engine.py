"""The step loop: plan, forward, decide, commit, tell. One thread owns all of it.

gRPC and asyncio live on the main thread and reach the engine through `submit`, `cancel` and the
draft calls, which post to a bounded inbox; events go back through sinks that never block.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from services.target.attachments import Attachment, Attachments
from services.target.feature_feed import FeatureFeed
from services.target.feature_store import FeatureSpec, FeatureStores
from services.target.inbox import Inbox
from services.target.request import (
    Delta,
    EventSink,
    Finished,
    GenerationRequest,
    ModelLimits,
    Started,
)
from services.target.scheduler import ScheduledSequence, Scheduler, StepPlan
from services.target.sequence import Sequence as TargetSequence
from services.target.step import kv_moves, sequence_rows
from services.target.step_report import EngineGauges, StepReport
from services.target.subscriptions import Subscriptions
from services.target.verifier import Decision, Verifier
from shared.errors import EngineFailed, OutriderError, QueueFull, Unavailable
from shared.kv.batch import build_batch
from shared.kv.leases import KvLeases
from shared.runtime.runner import ModelRunner
from shared.tokens import Candidate

T = TypeVar("T")
Clock = Callable[[], float]
logger = logging.getLogger(__name__)


class Engine:
    """Serves requests with one model.

    Args:
        runner: runs forwards of the target model and owns the KV pool.
        leases: who holds which page of that pool.
        clock: seconds, monotonic.
        on_step: called after each forward on the engine thread.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        leases: KvLeases,
        scheduler: Scheduler,
        verifier: Verifier,
        limits: ModelLimits,
        inbox: Inbox,
        clock: Clock,
        on_step: Callable[[StepReport], None] = lambda report: None,
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._leases = leases
        self._scheduler = scheduler
        self._verifier = verifier
        self._inbox = inbox
        self._clock = clock
        self._on_step = on_step
        self._attachments = Attachments()
        self._subscriptions = Subscriptions()
        config = runner.decoder.config
        self._stores = FeatureStores(
            num_slots=runner.pool.num_pages * runner.page_size,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            device=runner.device,
        )
        self._features = FeatureFeed(self._stores, self._attachments, leases.page_size)
        self._ids = itertools.count(1)
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failed = threading.Event()

    # From any thread: requests.

    def submit(self, request: GenerationRequest, sink: EventSink, key: int) -> None:
        """Queues a request; its events go to `sink` under `key`.

        Raises:
            InvalidArgument: the request can never be served.
            QueueFull: the engine is behind. A full admission queue arrives as a `Failed` event.
        """
        self._check_alive()
        self.limits.check(request)
        self._inbox.post(lambda: self._admit(request, sink, key))

    def cancel(self, sink: EventSink, key: int) -> None:
        """Ends a request; its pages are free before the next step. Unknown keys are ignored."""
        self._inbox.post(lambda: self._cancel(sink, key))

    # From any thread: drafts.

    def feature_width(self, spec: FeatureSpec) -> int:
        """Returns the width of the rows a spec asks for.

        Raises:
            FailedPrecondition: the target does not have such features.
        """
        spec.check(num_layers=self._stores.num_layers, hidden_size=self._stores.hidden_size)
        return spec.width(self._stores.hidden_size)

    def attach(self, attachment: Attachment) -> None:
        """Adds a draft; running sequences without one are handed to it."""
        self._check_alive()
        self._inbox.post(lambda: self._attach(attachment))

    def detach(self, attachment_id: str) -> None:
        """Forgets a draft; its sequences go on without."""
        self._inbox.post(lambda: self._detach(attachment_id))

    def offer(self, attachment_id: str, candidates: Sequence[Candidate]) -> None:
        """Takes candidates that a draft pushed."""
        self._inbox.post(lambda: self._attachments.offer(attachment_id, candidates, self._clock()))

    def release(self, attachment_id: str, sequence_ids: Sequence[int]) -> None:
        """A draft hands sequences back."""
        self._inbox.post(
            lambda: self._attachments.release(attachment_id, sequence_ids, self._clock())
        )

    # From any thread: operators.

    @property
    def has_failed(self) -> bool:
        """Whether the engine thread died; nothing will be served any more."""
        return self._failed.is_set()

    def attachments(self) -> Future[tuple[Attachment, ...]]:
        """Returns the live drafts, oldest first."""
        return self._call(lambda: self._attachments.live)

    def gauges(self) -> Future[EngineGauges]:
        """Returns the live figures."""
        return self._call(self.gauges_now)

    def flush_prefix_cache(self) -> Future[int]:
        """Frees every cached page no sequence reads; returns how many."""
        return self._call(self._leases.flush)

    def start(self) -> None:
        """Starts the engine thread."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the engine thread after the step it is in; requests still running fail."""
        self._stop.set()
        if self._thread is not None:
            with contextlib.suppress(QueueFull):  # a full inbox wakes the thread as well
                self._inbox.post(lambda: None)
            self._thread.join()

    # On the engine thread: the step.

    def step(self) -> bool:
        """Runs one step: commands, plan, forward, verdicts, events. Returns whether it did any."""
        self._inbox.run_all()
        now_s = self._clock()
        plan = self._scheduler.plan(
            lambda sequence: self._attachments.is_ready(sequence, now_s),
            self._attachments.candidate_tree,
        )
        self._start(plan, now_s)
        if plan.scheduled:
            self._on_step(self._execute(plan, now_s))
        self._tell()
        return bool(plan.scheduled or plan.preempted)

    def wait(self) -> None:
        """Sleeps until a command comes or the first wait for candidates is over."""
        self._inbox.run_all(wait_s=self._patience_s())

    def gauges_now(self) -> EngineGauges:
        """Returns the live figures."""
        return EngineGauges(
            self._scheduler.num_waiting,
            self._scheduler.num_running,
            self._leases.num_pages,
            self._leases.num_free_pages,
            self._leases.num_cached_pages,
            self._leases.num_held_pages,
        )

    def check_idle(self) -> None:
        """With nothing running every page is free or cached; anything else is our bug."""
        assert self._leases.num_held_pages == 0, f"{self._leases.num_held_pages} pages leaked"
        self._leases.check()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self.step():
                    self.wait()
            self._fail_all(Unavailable.draining())
        except Exception:  # whatever broke, every caller must hear of it
            logger.exception("the engine failed")
            self._failed.set()
            self._fail_all(EngineFailed.of())

    def _start(self, plan: StepPlan, now_s: float) -> None:
        """Announces sequences that leave the queue for the first time."""
        for sequence in plan.admitted:
            if sequence.started:
                continue
            sequence.started = True
            sequence.num_cached_tokens = sequence.num_computed
            queue_s = now_s - sequence.request.arrival_s
            self._subscriptions.emit(sequence, Started(sequence.num_cached_tokens, queue_s))
            self._attachments.assign(sequence, now_s)

    def _execute(self, plan: StepPlan, start_s: float) -> StepReport:
        rows = [sequence_rows(entry) for entry in plan.scheduled]
        batch = build_batch(rows, page_size=self._leases.page_size, device=self._runner.device)
        output = self._runner.run(batch, capture_layers=self._features.captured_layers)
        self._features.store(plan, batch.slots, output)
        drawn = [entry for entry in plan.scheduled if entry.is_complete]
        decisions = self._verifier.decide(drawn, output.logits) if drawn else []
        self._keep_accepted(drawn, decisions)
        for entry in plan.scheduled:
            entry.sequence.num_computed += entry.num_rows
        now_s = self._clock()
        num_committed = 0
        for entry, decision in zip(drawn, decisions, strict=True):
            num_committed += self._commit(entry, decision, now_s)
        return StepReport(
            duration_s=now_s - start_s,
            num_rows=sum(len(each.token_ids) for each in rows),
            num_rounds=len(drawn),
            num_committed=num_committed,
            num_drafted=sum(len(entry.tree) for entry in drawn),
            num_accepted=sum(len(decision.accepted_nodes) for decision in decisions),
            num_preempted=len(plan.preempted),
        )

    def _keep_accepted(
        self, drawn: Sequence[ScheduledSequence], decisions: Sequence[Decision]
    ) -> None:
        """Brings KV and features of accepted nodes into path order."""
        moves = [
            move
            for entry, decision in zip(drawn, decisions, strict=True)
            for move in kv_moves(entry, decision.accepted_nodes, self._leases.page_size)
        ]
        if moves:
            slots = torch.tensor(moves, dtype=torch.int64, device=self._runner.device)
            source, target = slots.unbind(1)
            self._runner.pool.move(source, target)
            self._features.move(source, target)

    def _commit(self, entry: ScheduledSequence, decision: Decision, now_s: float) -> int:
        """Commits one decision and returns how many tokens that were."""
        sequence, was_verified = entry.sequence, bool(entry.tree.token_ids)
        was_prompt = not sequence.has_output
        committed = sequence.commit(decision.token_ids)
        accepted = decision.accepted_nodes[: len(committed)]
        # The last committed token is always left to compute.
        sequence.num_computed += min(len(accepted), len(committed) - 1)
        sequence.stats.num_rounds += 1
        if was_verified:
            sequence.stats.add_verified(len(entry.tree), len(accepted))
        self._attachments.count_round(
            sequence, len(accepted), was_verified=was_verified, now_s=now_s
        )
        logprobs = decision.logprobs[: len(committed)]
        delta = Delta(committed, logprobs, len(accepted), len(entry.tree))
        self._subscriptions.emit(sequence, delta)
        if sequence.finish_reason is not None:
            self._finish(sequence)
            return len(committed)
        if was_prompt:
            self._publish(sequence)
        self._attachments.decided(
            sequence,
            committed,
            tuple(entry.node_indices[node] for node in accepted),
            was_verified=was_verified,
            now_s=now_s,
        )
        return len(committed)

    def _publish(self, sequence: TargetSequence) -> None:
        """Shares the prompt's pages, so that equal prompts need not wait for this one to end."""
        assert sequence.lease is not None
        self._leases.publish(sequence.lease, sequence.token_ids[: sequence.num_computed])

    def _finish(self, sequence: TargetSequence) -> None:
        assert sequence.finish_reason is not None
        finished = Finished(
            sequence.finish_reason,
            sequence.num_prompt_tokens,
            sequence.num_output_tokens,
            sequence.num_cached_tokens,
            sequence.stop_token_id,
            sequence.stats,
        )
        self._subscriptions.emit(sequence, finished)
        self._forget(sequence)

    def _tell(self) -> None:
        """Sends one message to each draft and one batch to each sink."""
        self._features.send()
        for attachment, message in self._attachments.take_messages():
            if not attachment.port.send(message):
                logger.warning("draft %s does not keep up", attachment.identity.worker_id)
                attachment.port.close()
                self._detach(attachment.identity.attachment_id)
        self._subscriptions.deliver()

    def _patience_s(self) -> float | None:
        """How long an engine with nothing ready may sleep; None until a command comes."""
        if not self._scheduler.num_running:
            self.check_idle()
            return None
        deadlines_s = map(self._attachments.deadline_s, self._scheduler.running)
        return max(min(deadlines_s) - self._clock(), 0.0)

    # On the engine thread: commands.

    def _admit(self, request: GenerationRequest, sink: EventSink, key: int) -> None:
        sequence = TargetSequence.of(next(self._ids), request, self.limits)
        try:
            self._scheduler.submit(sequence)
        except QueueFull as error:
            self._subscriptions.refuse(sink, key, error)
            return
        self._subscriptions.add(sequence, sink, key)

    def _cancel(self, sink: EventSink, key: int) -> None:
        sequence = self._subscriptions.find(sink, key)
        if sequence is not None:
            self._forget(sequence)

    def _forget(self, sequence: TargetSequence) -> None:
        self._subscriptions.remove(sequence)
        self._scheduler.finish(sequence)
        self._attachments.close(sequence)

    def _attach(self, attachment: Attachment) -> None:
        if attachment.feature_spec is not None:
            self._features.open(attachment.feature_spec)
        started = [sequence for sequence in self._subscriptions.sequences if sequence.started]
        self._attachments.attach(attachment, started, self._clock())

    def _detach(self, attachment_id: str) -> None:
        self._attachments.detach(attachment_id, self._clock())

    def _fail_all(self, error: OutriderError) -> None:
        self._inbox.run_all()
        self._subscriptions.fail_all(error)
        for attachment in self._attachments.live:
            attachment.port.close()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        self._check_alive()
        return self._inbox.call(function)

    def _check_alive(self) -> None:
        if self._failed.is_set():
            raise EngineFailed.of()
        if self._stop.is_set():
            raise Unavailable.draining()
