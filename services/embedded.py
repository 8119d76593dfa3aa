"""A draft engine inside the target's process, behind the same attachment as a remote one.

Two processes that share one GPU pay a switch of contexts a step; here the same drafters run beside
the target, and feature rows stay on the device. The engines keep their threads and their queues:
only the wire between them is gone.
"""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path

from services.draft.engine import DraftEngine
from services.draft.events import (
    CandidatesReady,
    Event,
    FeatureRows,
    FeaturesArrived,
    LinkTerms,
    Opening,
    Output,
    RoundResult,
    RoundsDecided,
    SequencesClosed,
    SequencesOpened,
    SequencesReleased,
)
from services.draft.head_weights import HeadWeights
from services.draft.worker import MAX_TREE_NODES, WorkerIdentity
from services.target.drafts.assignment import MAX_CONDITIONAL_CANDIDATES
from services.target.drafts.attachment import (
    Attachment,
    DraftIdentity,
    DraftMessage,
    OpenedSequence,
)
from services.target.drafts.attachment_terms import AttachmentTerms
from services.target.drafts.draft_timeout import DraftTimeout
from services.target.drafts.feature_rows import FeatureRows as TargetRows
from services.target.drafts.feature_store import FeatureSpec
from services.target.drafts.hidden_state_sender import InProcessSender
from services.target.engine import Engine
from services.target.rounds.round_source import RoundSource
from services.target.verifier import VerificationMode
from shared.errors import EngineFailed, FailedPrecondition, QueueFull, Unavailable
from shared.tokens import Verdict

logger = logging.getLogger(__name__)
ATTACHMENT_ID = "embedded"


class EmbeddedDraft:
    """Links one draft engine to the target engine of its process. A `DraftPort`."""

    def __init__(
        self,
        target: Engine,
        draft: DraftEngine,
        worker: WorkerIdentity,
        terms: AttachmentTerms,
        rounds: RoundSource | None = None,
        weights: HeadWeights | None = None,
    ) -> None:
        """Args:
        rounds: the draft's head and pages, for the target's rounds on the device.
        weights: of the draft, for whoever swaps them.
        """
        self._target = target
        self._draft = draft
        self._worker = worker
        self._terms = terms
        self._rounds = rounds
        self._weights = weights
        self._link: int | None = None

    def attach(self, tokenizer_sha256: str) -> None:
        """Attaches the draft for the life of the process.

        Raises:
            FailedPrecondition: tokenizers differ, or the target lacks the features.
        """
        worker, spec = self._worker, self._feature_spec()
        if worker.tokenizer_sha256 not in (None, tokenizer_sha256):
            assert worker.tokenizer_sha256 is not None
            raise FailedPrecondition.tokenizer_mismatch(worker.tokenizer_sha256, tokenizer_sha256)
        if spec is not None:
            self._target.feature_width(spec)
        max_sequences = min(worker.max_sequences, self._terms.max_sequences)
        self._link = self._draft.open_link(self._link_terms(max_sequences), self._deliver)
        identity = DraftIdentity(
            attachment_id=ATTACHMENT_ID,
            worker_id=worker.worker_id,
            model_id=worker.model_id,
            algorithm=worker.algorithm,
            max_sequences=max_sequences,
            attach_time_s=time.time(),
            shape=worker.shape,
        )
        timeout = DraftTimeout(self._terms.longest_wait_s)
        self._target.attach(
            Attachment(identity, self, timeout, spec, sender=InProcessSender(), rounds=self._rounds)
        )

    def send(self, message: DraftMessage) -> bool:
        """Hands a step's news to the draft engine; False when it does not keep up or has died."""
        assert self._link is not None
        try:
            for event in _events(self._link, message):
                self._draft.submit(event)
        except (QueueFull, EngineFailed) as error:
            logger.error("the embedded draft is given up: %s", error.message)
            return False
        return True

    def close(self) -> None:
        """Ends the link; called once, by the target."""
        if self._link is not None:
            self._draft.close_link(self._link)

    @property
    def algorithm(self) -> str:
        """Name of the drafter's algorithm."""
        return self._worker.algorithm

    def take_weights(self, folder: Path, version: str) -> float:
        """See `HeadWeights.take`."""
        assert self._weights is not None
        return self._weights.take(folder, version)

    def stop(self) -> None:
        """Ends the draft engine's thread."""
        self._draft.stop()

    def _deliver(self, output: Output) -> None:
        """Takes what the draft engine has to say; called on its thread. A target that stops, or is
        that far behind, continues without the draft, and the draft stays whole."""
        try:
            if isinstance(output, CandidatesReady):
                self._target.offer(ATTACHMENT_ID, output.candidates, output.report)
            elif isinstance(output, SequencesReleased):
                self._target.release(ATTACHMENT_ID, output.sequence_ids)
        except (QueueFull, EngineFailed, Unavailable) as error:
            logger.debug("the target did not hear the embedded draft: %s", error.message)

    def _link_terms(self, max_sequences: int) -> LinkTerms:
        return LinkTerms(
            vocab_size=self._target.limits.vocab_size,
            max_nodes=min(self._terms.max_nodes, MAX_TREE_NODES),
            max_sequences=max_sequences,
            mirrors_noise=self._terms.mode is VerificationMode.COUPLED,
            max_conditional=MAX_CONDITIONAL_CANDIDATES,
            draws_chains=self._terms.mode.draws_chains,
        )

    def _feature_spec(self) -> FeatureSpec | None:
        wanted = self._worker.feature_spec
        if wanted is None:
            return None
        return FeatureSpec.of(wanted.layer_indices, wanted.dtype, wanted.projection)


def _events(link: int, message: DraftMessage) -> list[Event]:
    """Returns the events of one step in the order of the wire: closed, opened, rows, verdicts."""
    events: list[Event] = []
    if message.closed:
        events.append(SequencesClosed(link, message.closed))
    if message.opened:
        events.append(SequencesOpened(link, tuple(map(_opening, message.opened))))
    rows = {each.sequence_id: each for each in message.features}
    results: list[RoundResult] = []
    for verdict in message.verdicts:
        before, own = _split(rows.pop(verdict.sequence_id, None), verdict)
        events.extend(_arrived(link, before))
        results.append(RoundResult(verdict, own))
    events.extend(itertools.chain.from_iterable(_arrived(link, each) for each in rows.values()))
    if results:
        events.append(RoundsDecided(link, tuple(results)))
    return events


def _split(
    rows: TargetRows | None, verdict: Verdict
) -> tuple[TargetRows | None, FeatureRows | None]:
    if rows is None:
        return None, None
    before, own = rows.split(len(verdict.committed_token_ids))
    return before, FeatureRows(own.position_offset, own.rows)


def _arrived(link: int, rows: TargetRows | None) -> list[Event]:
    if rows is None or not len(rows.rows):
        return []
    arrived = FeatureRows(rows.position_offset, rows.rows)
    return [FeaturesArrived(link, rows.sequence_id, arrived)]


def _opening(sequence: OpenedSequence) -> Opening:
    return Opening(
        sequence_id=sequence.sequence_id,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sequence.sampling,
        round=sequence.round,
        tree_request=sequence.tree_request,
        request_id=sequence.request_id,
        traceparent=sequence.traceparent,
        cache_salt=sequence.cache_salt,
    )
