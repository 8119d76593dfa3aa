"""`SpeculationService`, which drafts dial: the handshake, and the adapter between their streams and
the engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from grpc import aio

from services.target.drafts.assignments import MAX_CONDITIONAL_CANDIDATES
from services.target.drafts.attachment import (
    Attachment,
    AttachmentTerms,
    DraftIdentity,
    DraftStream,
    DraftTimeout,
    MappedOffer,
)
from services.target.drafts.draft_exchange import MAX_UNSENT
from services.target.drafts.draft_messages import (
    MAX_CHUNK_BYTES,
    draft_messages,
    feature_spec,
    ring_message,
)
from services.target.engine import Engine
from services.target.requests.generate_service import ServedModel
from services.target.verifier import VerificationMode
from services.target.weight_control import WeightControl
from shared.errors import (
    EngineFailed,
    FailedPrecondition,
    InvalidArgument,
    OutriderError,
    Unavailable,
)
from shared.models.heads.target_tensors import Table
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.speculation.v1 import speculation_service_pb2_grpc as pb_grpc
from shared.rpc.columns import TreeLimits, candidates_from_message, report_from_message
from shared.rpc.requests import shape_from_message, shape_message
from shared.rpc.server import Lifecycle
from shared.runtime.device import device_id
from shared.runtime.outcome_chains import MAX_OUTCOMES
from shared.runtime.ring_memory import FeatureRings, FeatureRingWriter, RingUnavailable, host_id
from shared.runtime.tensor_codec import dtype_from_number, tensor_message
from shared.telemetry.wire_meter import StreamMeter, WireMeter

logger = logging.getLogger(__name__)
_LONGEST_NAME = 256
_MAX_QUEUED = 256
"""Most messages queued for one draft. A draft with more is detached."""
_MODES = {
    VerificationMode.COUPLED: pb.VERIFICATION_MODE_COUPLED,
    VerificationMode.POINT_MASS: pb.VERIFICATION_MODE_POINT_MASS,
    # Trees on the wire carry no distributions, so they are point masses.
    VerificationMode.REJECTION: pb.VERIFICATION_MODE_POINT_MASS,
    VerificationMode.BLOCK: pb.VERIFICATION_MODE_POINT_MASS,
}


@dataclass(frozen=True, slots=True)
class AcceptedDraft:
    """A draft that passed the handshake.

    Attributes:
        stream: queue of messages to it.
        attached: the response to its `Attach`.
    """

    attachment: Attachment
    stream: DraftStream
    attached: pb.Attached


class Handshake:
    """Accepts drafts: checks `Attach`, opens shared memory and responds with the terms. Runs on the
    event loop."""

    def __init__(
        self, engine: Engine, model: ServedModel, terms: AttachmentTerms, lifecycle: Lifecycle
    ) -> None:
        self._engine = engine
        self._model = model
        self._terms = terms
        self._lifecycle = lifecycle
        self._ids = itertools.count(1)
        self._rings = FeatureRings(engine.device)

    def accept(self, attach: pb.Attach) -> AcceptedDraft:
        """Returns the draft, which is not attached to the engine yet. The caller has to `release`
        it at the end.

        Raises:
            OutriderError: the draft cannot draft for this target, or the target is draining.
        """
        self._lifecycle.check_open()
        self._check(attach)
        attachment, stream = self._attachment(attach)
        attachment.ring = self._open_ring(attach, attachment)
        return AcceptedDraft(attachment, stream, self._attached(attachment))

    def release(self, draft: AcceptedDraft) -> None:
        """Closes the shared memory of a draft."""
        if draft.attachment.ring is not None:
            self._rings.close(draft.attachment.ring)

    def _attachment(self, attach: pb.Attach) -> tuple[Attachment, DraftStream]:
        most_queued = MAX_UNSENT if attach.learns else _MAX_QUEUED
        stream = DraftStream(asyncio.get_running_loop(), most_queued)
        identity = DraftIdentity(
            attachment_id=f"attachment-{next(self._ids)}",
            worker_id=attach.worker_id,
            model_id=attach.model_id,
            algorithm=attach.algorithm,
            max_sequences=min(attach.max_sequence_count, self._terms.max_sequences),
            attach_time_s=time.time(),
            shape=shape_from_message(attach.shape) if attach.HasField("shape") else None,
        )
        spec = feature_spec(attach.feature_spec) if attach.HasField("feature_spec") else None
        timeout = DraftTimeout(self._terms.longest_wait_s)
        attachment = Attachment(
            identity,
            stream,
            timeout,
            spec,
            learns=attach.learns,
            max_context_tokens=attach.max_context_token_count or None,
            mapped_offer=self._mapped_offer(attach),
        )
        return attachment, stream

    def _mapped_offer(self, attach: pb.Attach) -> MappedOffer | None:
        """Returns the offer of a draft that can map the target's memory: it is on this host, on
        another device of the same kind."""
        offer, engine = attach.mapped_head, self._engine
        if not attach.HasField("mapped_head"):
            return None
        own_id = device_id(engine.device)
        is_mappable = bool(offer.host_id) and offer.host_id == host_id()
        if bool(offer.device_id) != bool(own_id):
            is_mappable = False
        if not is_mappable or (own_id and offer.device_id == own_id):
            return None
        if offer.page_size != engine.page_size:
            logger.warning(
                "%s pushes its trees: its pages hold %d tokens, the target's %d",
                *(attach.worker_id, offer.page_size, engine.page_size),
            )
            return None
        return MappedOffer(
            offer.vocab_size,
            offer.max_context_token_count,
            offer.shape_pinned,
            min(offer.outcome_count, MAX_OUTCOMES),
        )

    def _check(self, attach: pb.Attach) -> None:
        own_sha256 = self._model.tokenizer_sha256
        if attach.tokenizer_sha256 and attach.tokenizer_sha256 != own_sha256:
            raise FailedPrecondition.tokenizer_mismatch(attach.tokenizer_sha256, own_sha256)
        for name in ("worker_id", "model_id", "algorithm"):
            length = len(getattr(attach, name))
            if length > _LONGEST_NAME:
                message = f"{name} has {length:,} characters; at most {_LONGEST_NAME} are accepted"
                raise InvalidArgument.of("ATTACH_OUT_OF_RANGE", name, message)
        if attach.learns and not attach.HasField("feature_spec"):
            message = "a learner reads features; feature_spec is missing"
            raise InvalidArgument.of("ATTACH_OUT_OF_RANGE", "feature_spec", message)
        _check_least("max_sequence_count", attach.max_sequence_count, 1)
        _check_least("max_node_count", attach.max_node_count, 1)
        if attach.HasField("mapped_head"):
            offer = attach.mapped_head
            _check_least("mapped_head.vocab_size", offer.vocab_size, 1)
            _check_least("mapped_head.max_context_token_count", offer.max_context_token_count, 2)
            _check_least("mapped_head.outcome_count", offer.outcome_count, 0)

    def _open_ring(self, attach: pb.Attach, attachment: Attachment) -> FeatureRingWriter | None:
        """Opens shared memory with a draft on this host that can read it; returns None where the
        features have to be sent as bytes."""
        spec, offer = attachment.feature_spec, attach.feature_ring
        is_readable = offer.host_id and offer.host_id == host_id()
        if self._rings.is_on_cuda and not offer.reads_cuda:
            is_readable = False
        if spec is None or not is_readable or not self._terms.feature_ring_rows:
            return None
        width = self._engine.feature_width(spec)
        try:
            return self._rings.open(self._terms.feature_ring_rows, width, spec.dtype)
        except RingUnavailable as error:
            logger.warning("features go to %s as bytes: %s", attach.worker_id, error)
            return None

    def _attached(self, attachment: Attachment) -> pb.Attached:
        limits, spec, ring = self._engine.limits, attachment.feature_spec, attachment.ring
        width = 0 if spec is None else self._engine.feature_width(spec)
        attached = pb.Attached(
            attachment_id=attachment.identity.attachment_id,
            max_node_count=self._terms.max_nodes,
            max_sequence_count=attachment.identity.max_sequences,
            verification_mode=_MODES[self._terms.mode],
            max_context_token_count=limits.max_sequence_tokens,
            vocab_size=limits.vocab_size,
            max_conditional_candidate_count=MAX_CONDITIONAL_CANDIDATES,
            feature_width=width,
            feature_ring=None if ring is None else ring_message(ring),
        )
        if attachment.mapped_offer is None and not attachment.learns:
            shapes = self._engine.candidate_shapes(attachment.base_shape)
            attached.candidate_shapes.extend(map(shape_message, shapes))
        attached.candidate_wait_duration.FromNanoseconds(round(self._terms.longest_wait_s * 1e9))
        return attached


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidArgument.of(
            "ATTACH_OUT_OF_RANGE", name, f"{name} is {value}; at least {least}"
        )


Context = aio.ServicerContext[Any, Any]
_BLOCK_BYTES = 16 * 2**20
_LONGEST_VERSION = 256


class SpeculationServicer(pb_grpc.SpeculationServiceServicer):
    """Attaches drafts to one engine."""

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        terms: AttachmentTerms,
        lifecycle: Lifecycle,
        wire: WireMeter | None = None,
    ) -> None:
        self._engine = engine
        self._note_change = model.note_change
        self._handshake = Handshake(engine, model, terms, lifecycle)
        self._wire = wire or WireMeter()
        self._streams: dict[str, DraftStream] = {}
        windows = [size for size in engine.decoder.config.sliding_windows if size is not None]
        self._limits = TreeLimits(
            max_nodes=terms.max_nodes,
            vocab_size=engine.limits.vocab_size,
            # Every node has to see all its ancestors within the sliding window.
            max_depth=min(windows) - 1 if windows else terms.max_nodes,
        )

    async def Speculate(
        self, request_iterator: AsyncIterator[pb.SpeculateRequest], context: Context
    ) -> AsyncIterator[pb.SpeculateResponse]:
        attach = await self._read_attach(request_iterator)
        draft = self._handshake.accept(attach)
        attachment_id = draft.attached.attachment_id
        cause = "its connection broke or was closed"
        try:
            # Attached before the draft is told so, as it may rely on that from then on.
            self._streams[attachment_id] = draft.stream
            self._engine.attach(draft.attachment)
            logger.info("draft %s attached as %s", attach.worker_id, attachment_id)
            yield pb.SpeculateResponse(attached=draft.attached)
            meter = self._wire.stream(attachment_id)
            reader = asyncio.create_task(self._read(request_iterator, draft, meter))
            try:
                async for response in self._responses(draft, reader):
                    meter.sent(response.ByteSize(), response.WhichOneof("message") or "")
                    yield response
            finally:
                reader.cancel()
            cause = "it ended its stream"
        except OutriderError as error:
            cause = error.message
            raise
        finally:
            self._streams.pop(attachment_id, None)
            # Before `detach`: the engine thread may be waiting for a round of this draft.
            draft.attachment.abandon()
            self._engine.detach(attachment_id)
            self._handshake.release(draft)
            logger.info("draft %s detached from %s: %s", attach.worker_id, attachment_id, cause)

    async def ReadTable(
        self, request: pb.ReadTableRequest, context: Context
    ) -> AsyncIterator[pb.ReadTableResponse]:
        if request.table not in (pb.TABLE_EMBEDDING, pb.TABLE_LM_HEAD):
            message = f"table is {request.table}; it must be TABLE_EMBEDDING or TABLE_LM_HEAD"
            raise InvalidArgument.of("TABLE_UNKNOWN", "table", message)
        config, dtype = self._engine.decoder.config, dtype_from_number(request.data_type)
        row_bytes = config.hidden_size * dtype.itemsize
        size = max(_BLOCK_BYTES // row_bytes, 1)
        for start in range(0, config.vocab_size, size):
            end = min(start + size, config.vocab_size)
            rows = partial(
                WeightControl.table_rows,
                table=Table(request.table),
                start=start,
                end=end,
                dtype=dtype,
                num_updates=request.update_count,
            )
            copy = await asyncio.wrap_future(self._engine.with_weights(rows))
            block = await asyncio.to_thread(copy.read)
            for part in torch.split(block, max(MAX_CHUNK_BYTES // row_bytes, 1)):
                yield pb.ReadTableResponse(rows=tensor_message(part))

    def drain(self, grace_s: float) -> None:
        """Asks every draft to detach within the grace."""
        for stream in self._streams.values():
            stream.drain(grace_s)

    async def _responses(
        self, draft: AcceptedDraft, reader: asyncio.Task[None]
    ) -> AsyncIterator[pb.SpeculateResponse]:
        """Yields messages for the draft until it half-closes, errs, or is detached."""
        stream = draft.stream
        # One wait for all events: with several tasks a verdict would take more turns of the loop.
        reader.add_done_callback(lambda _: stream.wake())
        while True:
            await stream.news()
            while (grace_s := stream.take_grace_s()) is not None:
                drain = pb.Drain()
                drain.grace_duration.FromNanoseconds(round(grace_s * 1e9))
                yield pb.SpeculateResponse(drain=drain)
            if (message := stream.take()) is not None:
                for response in draft_messages(message):
                    yield response
            elif stream.is_over:
                raise self._why_closed(draft)
            if reader.done():
                reader.result()
                return

    def _why_closed(self, draft: AcceptedDraft) -> OutriderError:
        """Returns why the engine ended a draft's stream."""
        if draft.attachment.refusal is not None:
            return draft.attachment.refusal
        if self._engine.has_failed:
            return EngineFailed.of()
        return Unavailable("the draft does not keep up with the target", reason="DRAFT_TOO_SLOW")

    async def _read_attach(self, requests: AsyncIterator[pb.SpeculateRequest]) -> pb.Attach:
        async for message in requests:
            if message.WhichOneof("message") != "attach":
                break
            return message.attach
        raise _attach_required("the first message must be `attach`")

    async def _read(
        self,
        requests: AsyncIterator[pb.SpeculateRequest],
        draft: AcceptedDraft,
        meter: StreamMeter,
    ) -> None:
        """Takes messages until the draft half-closes.

        Raises:
            InvalidArgument: a message or a tree violates the protocol. The stream ends with this
                error, and its sequences go on without the draft.
        """
        identity, ring = draft.attachment.identity, draft.attachment.ring
        attachment_id = identity.attachment_id
        async for message in requests:
            kind = message.WhichOneof("message")
            meter.received(message.ByteSize(), kind or "")
            if kind == "candidates":
                batch = message.candidates
                candidates = candidates_from_message(batch, self._limits)
                self._engine.offer(attachment_id, candidates, report_from_message(batch))
            elif kind == "release":
                self._engine.release(attachment_id, tuple(message.release.sequence_ids))
            elif kind == "feature_ring_taken":
                _free(ring, message.feature_ring_taken.end)
            elif kind == "weights_updated":
                version = message.weights_updated.weight_version[:_LONGEST_VERSION]
                self._engine.draft_updated()
                self._note_change(identity.algorithm, version)
            elif kind == "mapped_head_ready":
                self._engine.map_head(attachment_id, tuple(message.mapped_head_ready.pages))
            elif kind == "attach":
                raise _attach_required("`attach` was sent twice")
            else:
                raise InvalidArgument.of("MESSAGE_EMPTY", "message", "the message is empty")


def _free(ring: FeatureRingWriter | None, end: int) -> None:
    if ring is None:
        raise InvalidArgument.of("RING_MALFORMED", "feature_ring_taken", "there is no ring")
    try:
        ring.free(end)
    except ValueError as error:
        raise InvalidArgument.of("RING_MALFORMED", "feature_ring_taken.end", str(error)) from error


def _attach_required(message: str) -> InvalidArgument:
    return InvalidArgument.of("ATTACH_REQUIRED", "attach", message)
