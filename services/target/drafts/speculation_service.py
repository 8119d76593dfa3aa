"""`SpeculationService`: drafts dial in. The adapter between their streams and the engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpc import aio

from services.target.drafts.assignment import MAX_CONDITIONAL_CANDIDATES
from services.target.drafts.attachment import Attachment, DraftIdentity
from services.target.drafts.attachment_terms import AttachmentTerms
from services.target.drafts.draft_messages import draft_messages, feature_spec, ring_message
from services.target.drafts.draft_stream import DraftStream
from services.target.drafts.feature_outlet import RingOutlet
from services.target.drafts.patience import Patience
from services.target.engine import Engine
from services.target.generate_service import ServedModel
from services.target.verifier import VerificationMode
from shared.errors import (
    EngineFailed,
    FailedPrecondition,
    InvalidArgument,
    OutriderError,
    Unavailable,
)
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.speculation.v1 import speculation_service_pb2_grpc as pb_grpc
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.trees import candidate_from_message, report_from_message, shape_from_message
from shared.runtime.feature_ring import FeatureRings, FeatureRingWriter
from shared.runtime.ring_memory import RingUnavailable, host_id
from shared.telemetry.wire_meter import StreamMeter, WireMeter
from shared.tokens import Candidate

logger = logging.getLogger(__name__)
_LONGEST_NAME = 256
Context = aio.ServicerContext[Any, Any]
_MODES = {
    VerificationMode.COUPLED: pb.VERIFICATION_MODE_COUPLED,
    VerificationMode.POINT_MASS: pb.VERIFICATION_MODE_POINT_MASS,
    # Laws never cross the wire, so trees that do are point masses.
    VerificationMode.REJECTION: pb.VERIFICATION_MODE_POINT_MASS,
    VerificationMode.BLOCK: pb.VERIFICATION_MODE_POINT_MASS,
}


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
        self._model = model
        self._terms = terms
        self._lifecycle = lifecycle
        self._wire = wire or WireMeter()
        self._ids = itertools.count(1)
        self._drains: dict[str, asyncio.Queue[pb.SpeculateResponse]] = {}
        self._rings = FeatureRings(engine.device)

    async def Speculate(
        self, request_iterator: AsyncIterator[pb.SpeculateRequest], context: Context
    ) -> AsyncIterator[pb.SpeculateResponse]:
        attach = await self._read_attach(request_iterator)
        attachment, stream = self._attachment(attach)
        attachment_id = attachment.identity.attachment_id
        ring = self._open_ring(attach, attachment)
        attached = self._attached(attachment, ring)
        cause = "its connection broke or was closed"
        try:
            # All of it before the draft hears that it is attached: from then on it may rely on it.
            drains = self._drains[attachment_id] = asyncio.Queue()
            self._engine.attach(attachment)
            logger.info("draft %s attached as %s", attach.worker_id, attachment_id)
            yield pb.SpeculateResponse(attached=attached)
            meter = self._wire.stream(attachment_id)
            reader = asyncio.create_task(self._read(request_iterator, attachment_id, ring, meter))
            try:
                async for response in self._responses(stream, drains, reader):
                    meter.sent(response.ByteSize(), response.WhichOneof("message") or "")
                    yield response
            finally:
                reader.cancel()
            cause = "it ended its stream"
        except OutriderError as error:
            cause = error.message
            raise
        finally:
            self._drains.pop(attachment_id, None)
            self._engine.detach(attachment_id)
            if ring is not None:
                self._rings.close(ring)
            logger.info("draft %s detached from %s: %s", attach.worker_id, attachment_id, cause)

    def drain(self, grace_s: float) -> None:
        """Asks every draft to detach within the grace."""
        message = pb.Drain()
        message.grace_duration.FromNanoseconds(round(grace_s * 1e9))
        for queue in self._drains.values():
            queue.put_nowait(pb.SpeculateResponse(drain=message))

    async def _responses(
        self,
        stream: DraftStream,
        drains: asyncio.Queue[pb.SpeculateResponse],
        reader: asyncio.Task[None],
    ) -> AsyncIterator[pb.SpeculateResponse]:
        """Yields messages for the draft until it half-closes, errs, or is detached."""
        drain = asyncio.ensure_future(drains.get())
        message = asyncio.ensure_future(stream.next())
        try:
            while True:
                await asyncio.wait([message, drain, reader], return_when=asyncio.FIRST_COMPLETED)
                if drain.done():
                    yield drain.result()
                    drain = asyncio.ensure_future(drains.get())
                if message.done():
                    news = message.result()
                    if news is None:
                        raise self._why_closed()
                    for response in draft_messages(news):
                        yield response
                    message = asyncio.ensure_future(stream.next())
                if reader.done():
                    reader.result()
                    return
        finally:
            drain.cancel()
            message.cancel()

    def _why_closed(self) -> OutriderError:
        """Returns why the engine ended a draft's stream."""
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
        attachment_id: str,
        ring: FeatureRingWriter | None,
        meter: StreamMeter,
    ) -> None:
        """Takes messages until the draft half-closes.

        Raises:
            InvalidArgument: a message or a tree breaks the protocol. The stream ends, loudly;
                sequences go on without the draft.
        """
        async for message in requests:
            kind = message.WhichOneof("message")
            meter.received(message.ByteSize(), kind or "")
            if kind == "candidates":
                batch = message.candidates
                report = report_from_message(batch)
                self._engine.offer(attachment_id, self._candidates(batch), report)
            elif kind == "release":
                self._engine.release(attachment_id, tuple(message.release.sequence_ids))
            elif kind == "feature_ring_taken":
                _free(ring, message.feature_ring_taken.end)
            elif kind == "attach":
                raise _attach_required("`attach` was sent twice")
            else:
                raise InvalidArgument.of("MESSAGE_EMPTY", "message", "the message is empty")

    def _candidates(self, batch: pb.CandidateBatch) -> Sequence[Candidate]:
        candidates = [candidate_from_message(each) for each in batch.candidates]
        for candidate in candidates:
            self._check_tree(candidate)
        return candidates

    def _check_tree(self, candidate: Candidate) -> None:
        tree = candidate.tree
        if len(tree) > self._terms.max_nodes:
            raise InvalidArgument.malformed_tree(
                f"{len(tree)} nodes; the target accepts {self._terms.max_nodes}"
            )
        vocab_size = self._engine.limits.vocab_size
        for token_id in tree.token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidArgument.malformed_tree(
                    f"token {token_id} is outside the vocabulary [0, {vocab_size})"
                )

    def _attachment(self, attach: pb.Attach) -> tuple[Attachment, DraftStream]:
        self._check(attach)
        stream = DraftStream(asyncio.get_running_loop(), self._terms.max_queued_messages)
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
        patience = Patience(self._terms.longest_wait_s)
        return Attachment(identity, stream, patience, spec), stream

    def _check(self, attach: pb.Attach) -> None:
        self._lifecycle.check_open()
        known = self._model.tokenizer_sha256
        if attach.tokenizer_sha256 and attach.tokenizer_sha256 != known:
            raise FailedPrecondition.tokenizer_mismatch(attach.tokenizer_sha256, known)
        for name in ("worker_id", "model_id", "algorithm"):
            length = len(getattr(attach, name))
            if length > _LONGEST_NAME:
                message = f"{name} has {length:,} characters; at most {_LONGEST_NAME} are accepted"
                raise InvalidArgument.of("ATTACH_OUT_OF_RANGE", name, message)
        for name in ("max_sequence_count", "max_node_count"):
            if getattr(attach, name) < 1:
                raise InvalidArgument.of(
                    "ATTACH_OUT_OF_RANGE", name, f"{name} is {getattr(attach, name)}; at least 1"
                )

    def _open_ring(self, attach: pb.Attach, attachment: Attachment) -> FeatureRingWriter | None:
        """Shares memory with a draft of this host that can read it; None leaves bytes."""
        spec, offer = attachment.feature_spec, attach.feature_ring
        is_readable = offer.host_id and offer.host_id == host_id()
        if self._rings.is_on_cuda and not offer.reads_cuda:
            is_readable = False
        if spec is None or not is_readable or not self._terms.feature_ring_rows:
            return None
        width = self._engine.feature_width(spec)
        try:
            ring = self._rings.open(self._terms.feature_ring_rows, width, spec.dtype)
        except RingUnavailable as error:
            logger.warning("features go to %s as bytes: %s", attach.worker_id, error)
            return None
        attachment.outlet = RingOutlet(ring)
        return ring

    def _attached(self, attachment: Attachment, ring: FeatureRingWriter | None) -> pb.Attached:
        limits, spec = self._engine.limits, attachment.feature_spec
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
        attached.candidate_wait_duration.FromNanoseconds(round(self._terms.longest_wait_s * 1e9))
        return attached


def _free(ring: FeatureRingWriter | None, end: int) -> None:
    if ring is None:
        raise InvalidArgument.of("RING_MALFORMED", "feature_ring_taken", "there is no ring")
    try:
        ring.free(end)
    except ValueError as error:
        raise InvalidArgument.of("RING_MALFORMED", "feature_ring_taken.end", str(error)) from error


def _attach_required(message: str) -> InvalidArgument:
    return InvalidArgument.of("ATTACH_REQUIRED", "attach", message)
