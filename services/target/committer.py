"""Commits decisions: tokens, their events, the verdicts for drafts and the step reports."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from services.target.drafts.attachments import Attachments
from services.target.drafts.feature_store import FeatureFeed, FeatureSpec
from services.target.launcher import LaunchedStep
from services.target.requests.request import Finished
from services.target.scheduler import ScheduledSequence, Subscriptions
from services.target.sequence import Sequence
from services.target.step_report import Clock, StepReport
from services.target.verifier import Decision
from services.target.weight_control import WeightVersion
from shared.generation import Delta, Failed, RoundTrace
from shared.kv.leases import KvLeases
from shared.runtime.host_copy import HostCopy
from shared.runtime.round_state import SequenceRound
from shared.tokens import TokenLogprobs, TreeShape


class Committed(NamedTuple):
    """Counts of one sequence in a step: draft nodes verified and accepted, and tokens committed."""

    num_drafted: int
    num_accepted: int
    num_tokens: int


class Committer:
    """Commits what sequences drew. Owned by the engine thread.

    Args:
        version: version of the weights.
        routes: spec of the recorded experts of each token; None where they are not recorded.
        forget: removes a sequence that has ended.
        release: frees the pages of a sequence that ended while its rows were in flight.

    Attributes:
        reports: reports of committed steps that the loop has not passed on yet.
    """

    def __init__(
        self,
        *,
        leases: KvLeases,
        subscriptions: Subscriptions,
        attachments: Attachments,
        version: WeightVersion,
        features: FeatureFeed,
        routes: FeatureSpec | None,
        clock: Clock,
        forget: Callable[[Sequence], None],
        release: Callable[[Sequence], None],
    ) -> None:
        self._features, self._routes = features, routes
        self._version = version
        self._leases = leases
        self._subscriptions = subscriptions
        self._attachments = attachments
        self._clock = clock
        self._forget = forget
        self._release = release
        self._committed_s = 0.0
        self.reports: list[StepReport] = []

    def commit_step(
        self, step: LaunchedStep, decided: SequenceOf[tuple[ScheduledSequence, Decision]]
    ) -> None:
        """Commits the decisions of a step.

        Args:
            decided: decisions about the sequences that have not ended since the launch.
        """
        now_s = self._clock()
        start_s, self._committed_s = max(step.start_s, self._committed_s), now_s
        parts: list[Committed] = []
        for entry, decision in decided:
            parts.append(self.commit(entry, decision, start_s, now_s))
            if entry.sequence.finish_reason is not None:
                self._forget(entry.sequence)
        for sequence in step.retired:
            self._release(sequence)
        self.report(
            parts,
            start_s,
            now_s,
            num_rows=step.num_rows,
            num_prompt_rows=step.num_prompt_rows,
            num_discarded=len(step.retired),
            num_preempted=len(step.plan.preempted),
            host_gap_s=step.host_gap_s,
        )

    def report(
        self,
        parts: SequenceOf[Committed],
        start_s: float,
        end_s: float,
        *,
        num_rows: int,
        num_prompt_rows: int,
        num_discarded: int,
        num_preempted: int = 0,
        host_gap_s: float = 0.0,
        round_shape: TreeShape | None = None,
    ) -> None:
        """Adds the report of a committed step; see `StepReport`.

        Args:
            parts: counts of the sequences that drew tokens.
        """
        outcomes, speculation = self._attachments.verdicts.take_counts()
        self.reports.append(
            StepReport(
                duration_s=end_s - start_s,
                end_s=end_s,
                host_gap_s=host_gap_s,
                num_rows=num_rows,
                num_prompt_rows=num_prompt_rows,
                num_rounds=len(parts),
                num_committed=sum(part.num_tokens for part in parts),
                num_drafted=sum(part.num_drafted for part in parts),
                num_accepted=sum(part.num_accepted for part in parts),
                num_preempted=num_preempted,
                outcomes=outcomes,
                speculation=speculation,
                num_discarded=num_discarded,
                round_shape=round_shape,
            )
        )

    def commit(
        self,
        entry: ScheduledSequence,
        decision: Decision,
        start_s: float,
        now_s: float,
        *,
        is_lane: bool = False,
    ) -> Committed:
        """Commits one decision.

        The commit may end the sequence: then `finish_reason` is set and its last event is emitted.

        Args:
            start_s: when the device could begin with the step.
            is_lane: the sequence has a lane, whose pages must not be replaced by shared ones.
        """
        sequence, has_tree = entry.sequence, bool(entry.tree.token_ids)
        was_verified = has_tree and self._attachments.assignments.has_tree(sequence)
        was_prompt, was_predicted = not sequence.has_output, sequence.prediction is not None
        since_s = None if was_prompt else sequence.decided_s
        committed = sequence.commit(decision.token_ids)
        accepted = decision.accepted_nodes[: len(committed)]
        trace = None
        if sequence.request.wants_trace:  # before the verdict is sent to the draft
            trace = self._trace(entry, accepted, start_s, now_s)
        sequence.decided_s = now_s
        # The last committed token is always left to compute.
        sequence.num_computed += min(len(accepted), len(committed) - 1)
        sequence.stats.num_rounds += 1
        if has_tree:
            sequence.stats.add_verified(len(entry.tree), len(accepted))
        self._attachments.verdicts.count_round(
            sequence, len(accepted), was_verified=was_verified, now_s=now_s
        )
        part = Committed(len(entry.tree), len(decision.accepted_nodes), len(committed))
        self._emit(sequence, committed, decision.logprobs, len(accepted), len(entry.tree), trace)
        if sequence.finish_reason is not None:
            return part
        if was_prompt and not is_lane:
            self._publish(sequence)
        if was_predicted and sequence.prediction is None:
            self._attachments.assignments.assign(sequence, now_s)
            return part
        self._attachments.verdicts.decided(
            sequence,
            committed,
            tuple(entry.node_indices[node] for node in accepted),
            was_verified=was_verified,
            since_s=since_s,
            now_s=now_s,
        )
        return part

    def commit_round(self, sequence: Sequence, round_: SequenceRound, now_s: float) -> Committed:
        """Commits a device round's tokens of a sequence without a draft; see `commit`."""
        committed = sequence.commit(round_.token_ids)
        num_accepted = min(len(round_.token_ids) - 1, len(committed))
        sequence.decided_s = now_s
        sequence.num_computed = len(sequence.token_ids) - 1
        sequence.stats.num_rounds += 1
        sequence.stats.add_verified(round_.num_drafted, num_accepted)
        self._emit(sequence, committed, round_.logprobs, num_accepted, round_.num_drafted)
        return Committed(round_.num_drafted, num_accepted, len(committed))

    def _emit(
        self,
        sequence: Sequence,
        committed: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        num_accepted: int,
        num_drafted: int,
        trace: RoundTrace | None = None,
    ) -> None:
        """Emits the committed tokens, and the last event if they end the sequence."""
        version = None
        if sequence.weight_version != self._version.name:  # sent once per change
            version = sequence.weight_version = self._version.name
        kept = logprobs[: len(committed)]
        delta = Delta(committed, kept, num_accepted, num_drafted, trace, version)
        self._subscriptions.emit(sequence, delta)
        if sequence.finish_reason is not None:
            self._subscriptions.emit(sequence, self._last_event(sequence))

    def _trace(
        self, entry: ScheduledSequence, accepted: tuple[int, ...], start_s: float, now_s: float
    ) -> RoundTrace:
        """Returns the trace of the round that was just committed."""
        sequence = entry.sequence
        # A step launched ahead may have begun before the host had read the step before it.
        begin_s = max(start_s, sequence.decided_s)
        return RoundTrace(
            round=sequence.round - 1,
            tree=entry.tree,
            accepted_nodes=accepted,
            num_rows=entry.num_rows + len(entry.tree),
            verify_s=now_s - begin_s,
            wait_s=begin_s - sequence.decided_s,
            draft=self._attachments.verdicts.answer(sequence),
        )

    def _publish(self, sequence: Sequence) -> None:
        """Caches the prompt's pages now, so that equal prompts need not wait for this one's end."""
        if sequence.lease is not None:  # else it was preempted, which caches the pages as well
            # A row in flight may still be discarded.
            num_tokens = min(sequence.num_computed, len(sequence.token_ids) - 1)
            self._leases.publish(sequence.lease, sequence.token_ids[:num_tokens])

    def _last_event(self, sequence: Sequence) -> Finished | Failed:
        if sequence.matcher is not None and sequence.matcher.failure is not None:
            return Failed(sequence.matcher.failure)
        if self._routes is None or not sequence.request.wants_routes:
            return Finished.of(sequence)
        end = len(sequence.token_ids) - 1  # all tokens but the last
        start, rows = self._features.stored_rows(self._routes, sequence.open_lease, 0, end)
        assert start == 0, f"the experts of {start} tokens were not recorded"
        return Finished.of(sequence, HostCopy(rows))
