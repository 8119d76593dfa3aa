"""One step of the engine: plan, forward, decide, commit, tell. All of it on one thread."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import torch

from services.target.attachment import Attachment
from services.target.attachments import Attachments
from services.target.feature_feed import FeatureFeed
from services.target.feature_store import FeatureStores
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
from shared.errors import OutriderError, QueueFull
from shared.kv.batch import build_batch
from shared.kv.leases import KvLeases
from shared.runtime.runner import ModelRunner
from shared.tokens import Candidate

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
    ) -> None:
        self._limits = limits
        self._runner = runner
        self._leases = leases
        self._scheduler = scheduler
        self._verifier = verifier
        self._clock = clock
        self._on_step = on_step
        config = runner.decoder.config
        stores = FeatureStores(
            num_slots=runner.pool.num_pages * runner.page_size,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            device=runner.device,
        )
        self.attachments = Attachments()
        self._features = FeatureFeed(stores, self.attachments, leases.page_size)
        self._subscriptions = Subscriptions()
        self._ids = itertools.count(1)

    def step(self) -> bool:
        """Plans, computes, commits and tells. Returns whether there was anything to do."""
        now_s = self._clock()
        plan = self._scheduler.plan(
            lambda sequence: self.attachments.is_ready(sequence, now_s),
            self.attachments.candidate_tree,
        )
        self._announce(plan, now_s)
        if plan.scheduled:
            self._on_step(self._execute(plan, now_s))
        self._tell()
        return bool(plan.scheduled or plan.preempted)

    def patience_s(self) -> float | None:
        """How long an engine with nothing ready may sleep; None until a command comes."""
        if not self._scheduler.num_running:
            self.check_idle()
            return None
        deadlines_s = map(self.attachments.deadline_s, self._scheduler.running)
        return max(min(deadlines_s) - self._clock(), 0.0)

    def admit(self, request: GenerationRequest, sink: EventSink, key: int) -> None:
        """Queues a request, or fails it when the admission queue is full."""
        sequence = TargetSequence.of(next(self._ids), request, self._limits)
        try:
            self._scheduler.submit(sequence)
        except QueueFull as error:
            self._subscriptions.refuse(sink, key, error)
            return
        self._subscriptions.add(sequence, sink, key)

    def cancel(self, sink: EventSink, key: int) -> None:
        """Ends a request without a further event."""
        sequence = self._subscriptions.find(sink, key)
        if sequence is not None:
            self._forget(sequence)

    def attach(self, attachment: Attachment) -> None:
        """Adds a draft and hands it the sequences that have left the queue."""
        if attachment.feature_spec is not None:
            self._features.open(attachment.feature_spec)
        started = [sequence for sequence in self._subscriptions.sequences if sequence.started]
        self.attachments.attach(attachment, started, self._clock())

    def detach(self, attachment_id: str) -> None:
        """Forgets a draft."""
        self.attachments.detach(attachment_id, self._clock())

    def offer(self, attachment_id: str, candidates: Sequence[Candidate]) -> None:
        """Takes candidates that a draft pushed."""
        self.attachments.offer(attachment_id, candidates, self._clock())

    def release(self, attachment_id: str, sequence_ids: Sequence[int]) -> None:
        """Takes sequences back from a draft."""
        self.attachments.release(attachment_id, sequence_ids, self._clock())

    def gauges(self) -> EngineGauges:
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

    def fail_all(self, error: OutriderError) -> None:
        """Fails every open request and ends every draft's stream."""
        self._subscriptions.fail_all(error)
        for attachment in self.attachments.live:
            attachment.port.close()

    def _announce(self, plan: StepPlan, now_s: float) -> None:
        """Announces sequences that leave the queue for the first time."""
        for sequence in plan.admitted:
            if sequence.started:
                continue
            sequence.started = True
            sequence.num_cached_tokens = sequence.num_computed
            queue_s = now_s - sequence.request.arrival_s
            self._subscriptions.emit(sequence, Started(sequence.num_cached_tokens, queue_s))
            self.attachments.assign(sequence, now_s)

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
        self.attachments.count_round(
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
        self.attachments.decided(
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
        for attachment, message in self.attachments.take_messages():
            if not attachment.port.send(message):
                logger.warning("draft %s does not keep up", attachment.identity.worker_id)
                attachment.port.close()
                self.detach(attachment.identity.attachment_id)
        self._subscriptions.deliver()

    def _forget(self, sequence: TargetSequence) -> None:
        self._subscriptions.remove(sequence)
        self._scheduler.finish(sequence)
        self.attachments.close(sequence)
