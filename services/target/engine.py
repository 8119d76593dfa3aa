"""The step loop: plan, forward, decide, commit, tell. One thread owns all of it.

gRPC and asyncio live on the main thread and reach the engine through `submit`, `cancel` and the
draft calls, which post to a bounded inbox; events go back through sinks that never block.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from services.target.attachments import Attachment, Attachments
from services.target.inbox import Inbox
from services.target.request import (
    Delta,
    Event,
    EventSink,
    Failed,
    Finished,
    GenerationRequest,
    ModelLimits,
    Started,
)
from services.target.scheduler import ScheduledSequence, Scheduler, StepPlan
from services.target.sequence import Sequence
from services.target.step import kv_moves, sequence_rows
from services.target.verifier import Decision, Verifier
from shared.errors import EngineFailed, OutriderError, QueueFull, Unavailable
from shared.kv.batch import build_batch
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.runtime.runner import ModelRunner
from shared.tokens import Candidate

T = TypeVar("T")
Clock = Callable[[], float]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did, for metrics.

    Attributes:
        duration_s: from plan to delivered events.
        num_rows: rows of the forward.
        num_decided: sequences that drew a token.
        num_committed: tokens committed.
        num_drafted: draft nodes verified.
        num_accepted: draft nodes accepted.
        num_missed: decided rounds of attached sequences without a tree.
    """

    duration_s: float
    num_rows: int
    num_decided: int
    num_committed: int
    num_drafted: int
    num_accepted: int
    num_preempted: int


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Live figures of the engine."""

    num_waiting: int
    num_running: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_held_pages: int


@dataclass(slots=True)
class _Subscription:
    sink: EventSink
    key: int


class Engine:
    """Serves requests with one model.

    Args:
        runner: runs forwards of the target model.
        pool: the KV the runner writes, for moving accepted paths.
        leases: who holds which page of `pool`.
        clock: seconds, monotonic.
        on_step: called after each step on the engine thread.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        pool: KvPool,
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
        self._pool = pool
        self._leases = leases
        self._scheduler = scheduler
        self._verifier = verifier
        self._inbox = inbox
        self._clock = clock
        self.on_step = on_step
        self._attachments = Attachments()
        self._ids = itertools.count(1)
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._subscriptions: dict[int, _Subscription] = {}
        self._events: dict[EventSink, list[tuple[int, Event]]] = defaultdict(list)
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failed = threading.Event()

    # Calls from any thread.

    @property
    def has_failed(self) -> bool:
        """Whether the engine thread died; nothing will be served any more."""
        return self._failed.is_set()

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

    def attach(self, attachment: Attachment) -> None:
        """Adds a draft; running sequences without one are handed to it."""
        self._check_alive()
        self._inbox.post(lambda: self._attach(attachment))

    def detach(self, attachment_id: str) -> None:
        """Forgets a draft; its sequences go on without."""
        self._inbox.post(lambda: self._detach(attachment_id))

    def offer(self, attachment_id: str, candidates: SequenceOf[Candidate]) -> None:
        """Takes candidates that a draft pushed."""
        self._inbox.post(lambda: self._attachments.offer(attachment_id, candidates, self._clock()))

    def release(self, attachment_id: str, sequence_ids: SequenceOf[int]) -> None:
        """A draft hands sequences back."""
        self._inbox.post(
            lambda: self._attachments.release(attachment_id, sequence_ids, self._clock())
        )

    def attachments(self) -> Future[tuple[Attachment, ...]]:
        """Returns the live drafts, oldest first."""
        return self._call(lambda: self._attachments.live)

    def gauges(self) -> Future[EngineGauges]:
        """Returns the live figures."""
        return self._call(self.gauges_now)

    def flush_prefix_cache(self) -> Future[int]:
        """Frees every cached page no sequence reads; returns how many."""
        return self._call(self._leases.flush)

    # The engine thread.

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

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.step(wait=True)
            self._fail_all(Unavailable.draining())
        except Exception:  # whatever broke, every caller must hear of it
            logger.exception("the engine failed")
            self._failed.set()
            self._fail_all(EngineFailed.of())

    def step(self, *, wait: bool = False) -> bool:
        """Runs one step: commands, plan, forward, verdicts, events.

        Args:
            wait: block until there is something to do.

        Returns:
            Whether a forward ran.
        """
        self._inbox.run_all()
        now_s = self._clock()
        plan = self._scheduler.plan(
            lambda sequence: self._attachments.is_ready(sequence, now_s),
            self._attachments.candidate_tree,
        )
        self._started(plan, now_s)
        if plan.scheduled:
            self.on_step(self._execute(plan, now_s))
        self._tell()
        if not plan.scheduled and not plan.preempted and wait:
            self._inbox.run_all(wait_s=self._patience_s())
        return bool(plan.scheduled)

    def _execute(self, plan: StepPlan, start_s: float) -> StepReport:
        rows = [sequence_rows(entry) for entry in plan.scheduled]
        batch = build_batch(rows, page_size=self._leases.page_size, device=self._runner.device)
        output = self._runner.run(batch)
        drawn = [entry for entry in plan.scheduled if entry.is_complete]
        decisions = self._verifier.decide(drawn, output.logits) if drawn else []
        self._keep_accepted_kv(drawn, decisions)
        for entry in plan.scheduled:
            entry.sequence.num_computed += entry.num_rows
        now_s = self._clock()
        num_committed = 0
        for entry, decision in zip(drawn, decisions, strict=True):
            num_committed += self._commit(entry, decision, now_s)
        return StepReport(
            duration_s=self._clock() - start_s,
            num_rows=sum(len(each.token_ids) for each in rows),
            num_decided=len(drawn),
            num_committed=num_committed,
            num_drafted=sum(len(entry.tree) for entry in drawn),
            num_accepted=sum(len(decision.accepted_nodes) for decision in decisions),
            num_preempted=len(plan.preempted),
        )

    def _keep_accepted_kv(
        self, drawn: SequenceOf[ScheduledSequence], decisions: SequenceOf[Decision]
    ) -> None:
        moves = [
            move
            for entry, decision in zip(drawn, decisions, strict=True)
            for move in kv_moves(entry, decision.accepted_nodes, self._leases.page_size)
        ]
        if moves:
            device = self._runner.device
            source, target = torch.tensor(moves, dtype=torch.int64, device=device).unbind(1)
            self._pool.move(source, target)

    def _commit(self, entry: ScheduledSequence, decision: Decision, now_s: float) -> int:
        sequence = entry.sequence
        was_prompt = not sequence.has_output
        committed = sequence.commit(decision.token_ids)
        accepted = decision.accepted_nodes[: len(committed)]
        sequence.stats.num_rounds += 1
        was_verified = bool(entry.tree.token_ids)
        if was_verified:
            sequence.stats.add_verified(len(entry.tree), len(accepted))
        # The last committed token is always left to compute.
        sequence.num_computed += min(len(accepted), len(committed) - 1)
        self._attachments.count_round(
            sequence, len(accepted), was_verified=was_verified, now_s=now_s
        )
        self._emit(sequence, Delta(committed, decision.logprobs[: len(committed)], len(accepted)))
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

    def _publish(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self._leases.publish(sequence.lease, sequence.token_ids[: sequence.num_computed])

    def _finish(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None
        self._emit(
            sequence,
            Finished(
                sequence.finish_reason,
                sequence.num_prompt_tokens,
                sequence.num_output_tokens,
                sequence.num_cached_tokens,
                sequence.stop_token_id,
                sequence.stats,
            ),
        )
        self._forget(sequence)

    def _started(self, plan: StepPlan, now_s: float) -> None:
        for sequence in plan.admitted:
            if sequence.started:
                continue
            sequence.started = True
            sequence.num_cached_tokens = sequence.num_computed
            queue_s = now_s - sequence.request.arrival_s
            self._emit(sequence, Started(sequence.num_cached_tokens, queue_s))
            self._attachments.assign(sequence, now_s)

    def _tell(self) -> None:
        for attachment, message in self._attachments.take_messages():
            if not attachment.port.send(message):
                logger.warning("draft %s does not keep up", attachment.identity.worker_id)
                attachment.port.close()
                self._detach(attachment.identity.attachment_id)
        events, self._events = self._events, defaultdict(list)
        for sink, batch in events.items():
            sink.deliver(batch)

    def _emit(self, sequence: Sequence, event: Event) -> None:
        subscription = self._subscriptions[sequence.sequence_id]
        self._events[subscription.sink].append((subscription.key, event))

    # Commands, on the engine thread.

    def _admit(self, request: GenerationRequest, sink: EventSink, key: int) -> None:
        sequence = Sequence.of(next(self._ids), request, self.limits)
        try:
            self._scheduler.submit(sequence)
        except OutriderError as error:
            self._events[sink].append((key, Failed(error)))
            return
        self._sequences[id(sink), key] = sequence
        self._subscriptions[sequence.sequence_id] = _Subscription(sink, key)

    def _cancel(self, sink: EventSink, key: int) -> None:
        sequence = self._sequences.get((id(sink), key))
        if sequence is not None:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        subscription = self._subscriptions.pop(sequence.sequence_id)
        del self._sequences[id(subscription.sink), subscription.key]
        self._scheduler.finish(sequence)
        self._attachments.close(sequence)

    def _attach(self, attachment: Attachment) -> None:
        self._attachments.attach(attachment, self._open_sequences(), self._clock())

    def _detach(self, attachment_id: str) -> None:
        self._attachments.detach(attachment_id, self._clock())

    def _open_sequences(self) -> Iterable[Sequence]:
        return (sequence for sequence in self._sequences.values() if sequence.started)

    def gauges_now(self) -> EngineGauges:
        """Returns the live figures; on the engine thread only."""
        return EngineGauges(
            self._scheduler.num_waiting,
            self._scheduler.num_running,
            self._leases.num_pages,
            self._leases.num_free_pages,
            self._leases.num_cached_pages,
            self._leases.num_held_pages,
        )

    def _patience_s(self) -> float | None:
        """How long an engine with nothing ready may sleep; None until a command comes."""
        if not self._scheduler.num_running:
            self.check_idle()
            return None
        deadlines_s = map(self._attachments.deadline_s, self._scheduler.running)
        return max(min(deadlines_s) - self._clock(), 0.0)

    def check_idle(self) -> None:
        """With nothing running every page is free or cached; anything else is our bug."""
        if not self._scheduler.num_waiting:
            assert self._leases.num_held_pages == 0
            self._leases.check()

    def _fail_all(self, error: OutriderError) -> None:
        self._inbox.run_all()
        for subscription in tuple(self._subscriptions.values()):
            self._events[subscription.sink].append((subscription.key, Failed(error)))
        self._subscriptions.clear()
        self._sequences.clear()
        for attachment in self._attachments.live:
            attachment.port.close()
        for sink, batch in self._events.items():
            sink.deliver(batch)
        self._events.clear()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        self._check_alive()
        return self._inbox.call(function)

    def _check_alive(self) -> None:
        if self._failed.is_set():
            raise EngineFailed.of()
        if self._stop.is_set():
            raise Unavailable.draining()
