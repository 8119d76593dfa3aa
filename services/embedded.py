"""A draft engine inside the target's process, behind the same attachment as a remote one.

Two processes that share one GPU pay a switch of contexts a step; here the same drafters run beside
the target, and feature rows stay on the device. The engines keep their threads and their queues:
only the wire between them is gone.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from services.draft.drafter_factory import build_drafter, use_device, worker_identity
from services.draft.drafters.drafter import Drafter
from services.draft.drafters.model_factory import Host
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.draft.drafters.table_service import borrowed_tensors
from services.draft.engine import DraftEngine
from services.draft.events import (
    MAX_TREE_NODES,
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
    WorkerIdentity,
)
from services.draft.head_weights import HeadWeights
from services.draft.metrics import DraftMetrics, engine_figures
from services.draft.recorder import DraftRecorder
from services.draft.settings import DraftSettings
from services.draft.warm_up import warm_up
from services.target.adaptive_config import DEFAULT_CONFIG
from services.target.drafts.assignments import MAX_CONDITIONAL_CANDIDATES
from services.target.drafts.attachment import (
    Attachment,
    AttachmentTerms,
    DraftIdentity,
    DraftMessage,
    DraftTimeout,
    OpenedSequence,
)
from services.target.drafts.attachment import FeatureRows as TargetRows
from services.target.drafts.feature_store import FeatureSpec
from services.target.engine import Engine
from services.target.process import attachment_terms
from services.target.rounds.round_shapes import MAX_ROWS, RoundSource, capacities
from services.target.runner_factory import round_memory_bytes
from services.target.settings import DeviceRoundsChoice, TargetSettings, rejection_flag
from services.target.verifier import VerificationMode
from shared.errors import EngineFailed, FailedPrecondition, QueueFull, SettingsError, Unavailable
from shared.models.decoder import Decoder
from shared.models.heads.target_tensors import TargetTensors
from shared.runtime.graphs import step_memory_bytes
from shared.runtime.round_head import OwnHead
from shared.settings import shown_settings
from shared.telemetry.start_up import start_phase
from shared.telemetry.tracing import NO_TRACER, Tracer
from shared.tokens import TreeShape, Verdict

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
            Attachment(identity, self, timeout, spec, is_in_process=True, rounds=self._rounds)
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


# Builds the draft that a target hosts, from the draft's own settings.

_NOT_EMBEDDED = frozenset(
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
        settings: by flag name, without those of a process of its own.
    """

    port: EmbeddedDraft
    settings: Mapping[str, str]
    metrics: DraftMetrics


def build_embedded_draft(
    target: Engine, settings: TargetSettings, chosen: DraftSettings, tracer: Tracer = NO_TRACER
) -> BuiltDraft:
    """Loads the drafter and starts its engine.

    Raises:
        CheckpointError: the draft's folder cannot be served.
        SettingsError: memory does not hold what the settings ask for.
    """
    with start_phase("load"):
        drafter = build_drafter(chosen, _host(target, settings, chosen))
    check_drafter(settings, chosen, drafter)
    shape = chosen.shape.as_chain if settings.verification.draws_chains else chosen.shape
    # Before the draft's thread has the drafter.
    rounds = _rounds(target, settings, chosen, drafter)
    recorder = DraftRecorder(tracer)
    engine = DraftEngine(
        drafter,
        shape,
        chunk_tokens=chosen.chunked_prefill_size,
        max_sequences=chosen.max_running_requests,
        recorder=recorder,
        is_pinned=chosen.is_shape_pinned,
        outcome_budget=chosen.speculative_outcome_budget,
        enter_thread=partial(use_device, chosen),
    )
    engine.start()
    with start_phase("warm-up"):
        warm_up(engine, drafter.limits.feature_spec)
    worker = replace(worker_identity(chosen, drafter.limits, worker_id="embedded"), shape=shape)
    shown = {k: v for k, v in shown_settings(chosen).items() if k not in _NOT_EMBEDDED}
    _follow_weights(target, settings, chosen, drafter, engine)
    weights = HeadWeights(chosen, drafter, engine, on_target=target.between_steps)
    port = EmbeddedDraft(target, engine, worker, attachment_terms(settings), rounds, weights)
    return BuiltDraft(port, shown, DraftMetrics(recorder.counters, lambda: engine_figures(engine)))


def _host(target: Engine, settings: TargetSettings, chosen: DraftSettings) -> Host:
    """Returns what the target shares; its tensors if all of them are here, and the draft was made
    for them."""
    is_whole = target.decoder.group is None
    is_lent = is_whole and chosen.target_model_path == settings.model_path
    is_cuda = target.device.type == "cuda"
    return Host(
        target.decoder if is_lent else None,
        target.num_kv_tokens,
        target.cache,
        _round_bytes(target.decoder) if is_cuda else 0,
        target.limits.vocab_size,
    )


def _round_bytes(decoder: Decoder) -> int:
    return round_memory_bytes(decoder.config) + step_memory_bytes(decoder)


def _follow_weights(
    target: Engine,
    settings: TargetSettings,
    chosen: DraftSettings,
    drafter: Drafter,
    engine: DraftEngine,
) -> None:
    """Has a head copy what it borrowed when the target's weights change, and drop what it knows of
    texts: features of other weights made it."""
    if chosen.target_model_path != settings.model_path:
        return
    shared, decoder = _host(target, settings, chosen).decoder, target.decoder
    borrowed = borrowed_tensors(chosen, drafter, shared)
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
    target: Engine, settings: TargetSettings, chosen: DraftSettings, drafter: Drafter
) -> RoundSource | None:
    """Returns the drafter's head and pages for rounds on the device; None where it has none."""
    is_wanted = settings.has_device_rounds(is_cuda=target.device.type == "cuda")
    is_coupled = settings.verification is VerificationMode.COUPLED
    if not (is_wanted and is_coupled and chosen.algorithm.has_model):
        return None
    if chosen.page_size != settings.page_size:
        logger.warning(
            "no rounds on the device: the draft's pages hold %d tokens, the target's %d",
            *(chosen.page_size, settings.page_size),
        )
        return None
    trees = _round_trees(settings, chosen)
    if isinstance(drafter, MultiLayerDrafter):
        trees = {tree: most for tree, most in trees.items() if tree.topk == 1}
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
        is_pinned=chosen.is_shape_pinned,
    )


def _round_trees(settings: TargetSettings, chosen: DraftSettings) -> dict[TreeShape, int]:
    """Returns the trees that rounds may have, each with the most sequences of a round; the first
    one is that of rounds while nothing is chosen."""
    config = settings.adaptive or DEFAULT_CONFIG
    is_pinned = chosen.is_shape_pinned
    shapes = (chosen.shape,) if is_pinned else config.round_shapes(chosen.shape)
    most = min(settings.max_running_requests, settings.cuda_graph_max_bs)
    return capacities(shapes, most)


def _log_capacities(settings: TargetSettings, trees: Mapping[TreeShape, int]) -> None:
    """Says how many sequences can have a lane."""
    shown = ", ".join(
        f"{count} with {tree.num_steps},{tree.topk},{tree.num_draft_tokens}"
        for tree, count in trees.items()
    )
    logger.info("lanes by shape of the trees (steps,topk,rows): %s", shown)
    most = max(trees.values())
    if most < settings.max_running_requests:
        logger.warning(
            "%d of %d running requests have a lane at most, the others step plainly; what limits "
            "lanes is --cuda-graph-max-bs and %d rows",
            *(most, settings.max_running_requests, MAX_ROWS),
        )


def check_drafter(settings: TargetSettings, chosen: DraftSettings, drafter: Drafter) -> None:
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
    if is_wanted and chosen.is_shape_pinned and chosen.shape.topk > 1:
        raise SettingsError(
            (
                f"--device-rounds on needs --speculative-eagle-topk 1 of a head of several layers; "
                f"it is {chosen.shape.topk}",
            )
        )
