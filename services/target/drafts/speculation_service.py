"""`SpeculationService`: drafts dial in. The adapter between their streams and the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import torch
from grpc import aio

from services.target.drafts.attachment_terms import AttachmentTerms
from services.target.drafts.draft_messages import MAX_CHUNK_BYTES, draft_messages
from services.target.drafts.draft_stream import DraftStream
from services.target.drafts.handshake_service import AcceptedDraft, Handshake
from services.target.engine import Engine
from services.target.requests.generate_service import ServedModel
from services.target.weight_control import WeightControl
from shared.errors import EngineFailed, InvalidArgument, OutriderError, Unavailable
from shared.models.heads.target_tensors import Table
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.speculation.v1 import speculation_service_pb2_grpc as pb_grpc
from shared.rpc.columns import TreeLimits, candidates_from_message, report_from_message
from shared.rpc.lifecycle import Lifecycle
from shared.runtime.feature_ring import FeatureRingWriter
from shared.runtime.tensor_codec import dtype_from_number, tensor_message
from shared.telemetry.wire_meter import StreamMeter, WireMeter

logger = logging.getLogger(__name__)
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
        self._changes = model.changes
        self._handshake = Handshake(engine, model, terms, lifecycle)
        self._wire = wire or WireMeter()
        self._streams: dict[str, DraftStream] = {}
        windows = [each for each in engine.decoder.config.sliding_windows if each is not None]
        self._limits = TreeLimits(
            max_nodes=terms.max_nodes,
            vocab_size=engine.limits.vocab_size,
            # No window may cut a node off from those before it in its tree.
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
            # All of it before the draft hears that it is attached: from then on it may rely on it.
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
        # One wait for all that may come: several tasks cost turns of the loop on a verdict's way.
        reader.add_done_callback(lambda _: stream.wake())
        while True:
            await stream.news()
            while (grace_s := stream.take_grace_s()) is not None:
                yield _drain(grace_s)
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
            InvalidArgument: a message or a tree breaks the protocol. The stream ends, loudly;
                sequences go on without the draft.
        """
        identity, ring = draft.attachment.identity, draft.ring
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
                self._changes.note(identity.algorithm, version)
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


def _drain(grace_s: float) -> pb.SpeculateResponse:
    message = pb.Drain()
    message.grace_duration.FromNanoseconds(round(grace_s * 1e9))
    return pb.SpeculateResponse(drain=message)


def _attach_required(message: str) -> InvalidArgument:
    return InvalidArgument.of("ATTACH_REQUIRED", "attach", message)
