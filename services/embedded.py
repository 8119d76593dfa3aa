"""A draft engine inside the target's process, behind the same attachment as a remote one.

Two processes that share one GPU pay a context switch per step. Here the same drafters run in the
target's process, and feature rows stay on the device. The two engines keep their threads and
queues; only the wire between them is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from services.draft.drafter_factory import (
    build_drafter,
    outcome_budget,
    use_device,
    worker_identity,
)
from services.draft.drafters.drafter import Drafter
from services.draft.drafters.model_factory import Host
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.draft.drafters.table_service import borrowed_tensors
from services.draft.engine import DraftEngine, warm_up
from services.draft.events import (
    MAX_TREE_NODES,
    CandidatesReady,
    Event,
    FeatureRows,
    FeaturesArrived,
    LinkTerms,
    Output,
    RoundResult,
    RoundsDecided,
    SequencesClosed,
    SequencesOpened,
    SequencesReleased,
    WorkerIdentity,
)
from services.draft.head_weights import HeadWeights
from services.draft.metrics import DraftMetrics, DraftRecorder
from services.draft.settings import DraftSettings
from services.target.adaptive_config import DEFAULT_CONFIG
from services.target.drafts.assignments import MAX_CONDITIONAL_CANDIDATES
from services.target.drafts.attachment import (
    Attachment,
    AttachmentTerms,
    DraftIdentity,
    DraftMessage,
    DraftTimeout,
)
from services.target.drafts.attachment import FeatureRows as TargetRows
from services.target.drafts.feature_store import FeatureSpec
from services.target.engine import Engine
from services.target.engine_factory import round_memory_bytes
from services.target.process import attachment_terms
from services.target.rounds.round_shapes import MAX_ROWS, RoundSource, capacities
from services.target.settings import DeviceRoundsChoice, TargetSettings, rejection_flag
from services.target.verifier import VerificationMode
from shared.errors import EngineFailed, FailedPrecondition, QueueFull, SettingsError, Unavailable
from shared.models.heads.target_tensors import TargetTensors
from shared.runtime.graphs import step_memory_bytes
from shared.runtime.round_head import OwnHead
from shared.settings import shown_settings
from shared.telemetry.start_up import start_phase
from shared.telemetry.tracing import NO_TRACER, Tracer
from shared.tokens import TreeShape

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
        rounds: the draft's head and KV pages, for the target's rounds on the device.
        weights: swaps the draft's weights.
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
        worker, wanted = self._worker, self._worker.feature_spec
        spec = None
        if wanted is not None:
            spec = FeatureSpec.of(wanted.layer_indices, wanted.dtype, wanted.projection)
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
            Attachment(identity, self, timeout, spec, is_in_process=True, rounds=self._rounds)
        )

    def send(self, message: DraftMessage) -> bool:
        """Submits the events of a step to the draft engine; False if its queue is full or it has
        died."""
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
        return self._worker.algorithm

    def take_weights(self, folder: Path, version: str) -> float:
        """See `HeadWeights.take`."""
        assert self._weights is not None
        return self._weights.take(folder, version)

    def stop(self) -> None:
        """Ends the draft engine's thread."""
        self._draft.stop()

    def _deliver(self, output: Output) -> None:
        """Passes an output of the draft engine to the target; called on the draft's thread. A
        target that stops, or whose queue is full, misses it; the draft goes on."""
        try:
            if isinstance(output, CandidatesReady):
                self._target.offer(ATTACHMENT_ID, output.candidates, output.report)
            elif isinstance(output, SequencesReleased):
                self._target.release(ATTACHMENT_ID, output.sequence_ids)
        except (QueueFull, EngineFailed, Unavailable) as error:
            logger.debug("the target did not take an output of the draft: %s", error.message)

    def _link_terms(self, max_sequences: int) -> LinkTerms:
        return LinkTerms(
            vocab_size=self._target.limits.vocab_size,
            max_nodes=min(self._terms.max_nodes, MAX_TREE_NODES),
            max_sequences=max_sequences,
            mirrors_noise=self._terms.mode is VerificationMode.COUPLED,
            max_conditional=MAX_CONDITIONAL_CANDIDATES,
            draws_chains=self._terms.mode.draws_chains,
        )


def _events(link: int, message: DraftMessage) -> list[Event]:
    """Returns the events of one step in the order of the wire: closed, opened, feature rows,
    verdicts."""
    events: list[Event] = []
    if message.closed:
        events.append(SequencesClosed(link, tuple(message.closed)))
    if message.opened:
        events.append(SequencesOpened(link, tuple(message.opened)))
    features = {rows.sequence_id: rows for rows in message.features}
    results: list[RoundResult] = []
    for verdict in message.verdicts:
        committed: FeatureRows | None = None
        if verdict.sequence_id in features:
            rows = features.pop(verdict.sequence_id)
            earlier, last = rows.split(len(verdict.committed_token_ids))
            events.extend(_features_arrived(link, earlier))
            committed = FeatureRows(last.position_offset, last.rows)
        results.append(RoundResult(verdict, committed))
    for rows in features.values():
        events.extend(_features_arrived(link, rows))
    if results:
        events.append(RoundsDecided(link, tuple(results)))
    return events


def _features_arrived(link: int, rows: TargetRows) -> list[Event]:
    if not len(rows.rows):
        return []
    return [FeaturesArrived(link, rows.sequence_id, FeatureRows(rows.position_offset, rows.rows))]


# Flags of a draft's own process, without effect in the target's.
_PROCESS_FLAGS = frozenset(
    {
        *("target", "target-tls-ca", "target-tls-cert", "target-tls-key", "target-tls-name"),
        *("host", "port", "maintenance-host", "maintenance-port", "num-threads"),
        *("tls-cert", "tls-key", "tls-client-ca", "otlp-endpoint", "trace-sample-ratio"),
        *("metrics-port", "tp-size", "exit-when-refused"),
    }
)


@dataclass(frozen=True, slots=True)
class BuiltDraft:
    """A draft ready to attach.

    Attributes:
        settings: by flag name, without those that only a draft's own process has.
    """

    port: EmbeddedDraft
    settings: Mapping[str, str]
    metrics: DraftMetrics


def build_embedded_draft(
    target: Engine,
    settings: TargetSettings,
    draft_settings: DraftSettings,
    tracer: Tracer = NO_TRACER,
) -> BuiltDraft:
    """Loads the drafter and starts its engine.

    Raises:
        CheckpointError: the draft's folder cannot be served.
        SettingsError: the settings ask for more memory than there is.
    """
    with start_phase("load"):
        drafter = build_drafter(draft_settings, _host(target, settings, draft_settings))
    check_drafter(settings, draft_settings, drafter)
    shape = draft_settings.shape
    if settings.verification.draws_chains:
        shape = shape.as_chain
    # Before the draft engine's thread uses the drafter.
    rounds = _rounds(target, settings, draft_settings, drafter)
    recorder = DraftRecorder(tracer)
    engine = DraftEngine(
        drafter,
        shape,
        chunk_tokens=draft_settings.chunked_prefill_size,
        max_sequences=draft_settings.max_running_requests,
        recorder=recorder,
        is_pinned=draft_settings.is_shape_pinned,
        outcome_budget=outcome_budget(draft_settings),
        enter_thread=partial(use_device, draft_settings),
    )
    engine.start()
    with start_phase("warm-up"):
        warm_up(engine, drafter.limits.feature_spec)
    worker = replace(
        worker_identity(draft_settings, drafter.limits, worker_id="embedded"), shape=shape
    )
    shown = {k: v for k, v in shown_settings(draft_settings).items() if k not in _PROCESS_FLAGS}
    _follow_weights(target, settings, draft_settings, drafter, engine)
    weights = HeadWeights(draft_settings, drafter, engine, on_target=target.between_steps)
    port = EmbeddedDraft(target, engine, worker, attachment_terms(settings), rounds, weights)
    return BuiltDraft(port, shown, DraftMetrics(recorder.counters, engine.figures))


def _host(target: Engine, settings: TargetSettings, draft_settings: DraftSettings) -> Host:
    """Returns what the target shares with the draft: also its weights, if this process holds all of
    them and the draft was made for this target."""
    decoder = target.decoder
    is_whole = decoder.group is None
    is_shared = is_whole and draft_settings.target_model_path == settings.model_path
    is_cuda = target.device.type == "cuda"
    return Host(
        decoder if is_shared else None,
        target.num_kv_tokens,
        target.cache,
        round_memory_bytes(decoder.config) + step_memory_bytes(decoder) if is_cuda else 0,
        target.limits.vocab_size,
    )


def _follow_weights(
    target: Engine,
    settings: TargetSettings,
    draft_settings: DraftSettings,
    drafter: Drafter,
    engine: DraftEngine,
) -> None:
    """When the target's weights change, has a head copy the tensors that it borrowed, and drop its
    prefix cache, which was computed from features of the old weights."""
    if draft_settings.target_model_path != settings.model_path:
        return
    shared, decoder = _host(target, settings, draft_settings).decoder, target.decoder
    borrowed = borrowed_tensors(draft_settings, drafter, shared)
    if borrowed is None:
        return
    if shared is None:
        tensors = TargetTensors(decoder.config, partial(target.read_table, dtype=borrowed.dtype))
    else:
        tensors = TargetTensors.of_decoder(shared, borrowed.dtype)

    def follow() -> None:
        borrowed.follow(tensors)
        with suppress(EngineFailed):
            engine.between_rounds(drafter.retire_prefix_cache)

    target.follow_weights(follow)


def _rounds(
    target: Engine, settings: TargetSettings, draft_settings: DraftSettings, drafter: Drafter
) -> RoundSource | None:
    """Returns the drafter's head and KV pages for rounds on the device, or None if the settings or
    the drafter do not allow such rounds."""
    is_wanted = settings.has_device_rounds(is_cuda=target.device.type == "cuda")
    is_coupled = settings.verification is VerificationMode.COUPLED
    if not (is_wanted and is_coupled and draft_settings.algorithm.has_model):
        return None
    if draft_settings.page_size != settings.page_size:
        logger.warning(
            "no rounds on the device: the draft's pages hold %d tokens, the target's %d",
            *(draft_settings.page_size, settings.page_size),
        )
        return None
    config, shape = settings.adaptive or DEFAULT_CONFIG, draft_settings.shape
    # The first shape is used until another one is chosen.
    shapes = (shape,) if draft_settings.is_shape_pinned else config.round_shapes(shape)
    trees = capacities(shapes, min(settings.max_running_requests, settings.cuda_graph_max_bs))
    if isinstance(drafter, MultiLayerDrafter):
        trees = {tree: capacity for tree, capacity in trees.items() if tree.topk == 1}
        if not trees:
            logger.warning("no rounds on the device: a head of several layers drafts chains there")
            return None
    shared = drafter.share_head()
    if shared is None:
        return None
    _log_capacities(settings, trees)
    return RoundSource(
        head=OwnHead(shared.model),
        pages=shared.pages,
        trees=trees,
        max_context_tokens=min(shared.max_context_tokens, target.limits.max_sequence_tokens),
        is_pinned=draft_settings.is_shape_pinned,
    )


def _log_capacities(settings: TargetSettings, trees: Mapping[TreeShape, int]) -> None:
    """Logs how many sequences can have a lane."""
    shown = ", ".join(
        f"{count} with {tree.num_steps},{tree.topk},{tree.num_draft_tokens}"
        for tree, count in trees.items()
    )
    logger.info("lanes by shape of the trees (steps,topk,rows): %s", shown)
    num_lanes = max(trees.values())
    if num_lanes < settings.max_running_requests:
        logger.warning(
            "%d of %d running requests have a lane at most, the others take plain steps; lanes are "
            "limited by --cuda-graph-max-bs and %d rows",
            *(num_lanes, settings.max_running_requests, MAX_ROWS),
        )


def check_drafter(
    settings: TargetSettings, draft_settings: DraftSettings, drafter: Drafter
) -> None:
    """Raises:
    SettingsError: the loaded drafter does not fit the target's verification rule or its rounds.
    """
    if not isinstance(drafter, MultiLayerDrafter):
        return
    if settings.verification.draws_chains:
        raise SettingsError(
            (f"{rejection_flag(settings)} needs a head of one layer; this one has several",)
        )
    is_wanted = settings.device_rounds is DeviceRoundsChoice.ON
    if is_wanted and draft_settings.is_shape_pinned and draft_settings.shape.topk > 1:
        raise SettingsError(
            (
                f"--device-rounds on needs --speculative-eagle-topk 1 of a head of several layers; "
                f"it is {draft_settings.shape.topk}",
            )
        )
