"""`TargetService`: prompts in, streams of tokens out. The adapter between gRPC and the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from services.target.engine import Engine
from services.target.requests.event_messages import response_message, session_event
from services.target.requests.event_stream import EventStream
from services.target.requests.request import Failed, Finished
from services.target.requests.request_service import RequestService
from services.target.requests.session_service import OpenSession
from services.target.weight_changes import WeightChanges
from shared.errors import OutriderError
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.telemetry.request_id import current_request_id, current_traceparent
from shared.weight_change import WeightChange

Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Identity of the model.

    Attributes:
        model_id: name clients pass as `model`.
        tokenizer_sha256: see `shared.tokenizer_files`.
        output_fingerprint: see `services.target.output_fingerprint`.
        changes: of its weights, and of its drafts'.
    """

    model_id: str
    tokenizer_sha256: str
    output_fingerprint: str = ""
    changes: WeightChanges = field(default_factory=WeightChanges)


class TargetServicer(pb_grpc.TargetServiceServicer):
    """Serves one engine."""

    def __init__(self, engine: Engine, model: ServedModel, requests: RequestService) -> None:
        self._engine = engine
        self._model = model
        self._requests = requests

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        requests, stream = self._requests, EventStream(asyncio.get_running_loop())
        record = requests.record(request, current_request_id.get(), current_traceparent.get())
        requests.open_requests.add()
        try:
            await requests.submit(request, record, stream, key=0)
            while True:
                for _, event in await stream.next_batch():
                    record.observe(event)
                    if isinstance(event, Failed):
                        raise event.error
                    yield response_message(event)
                    if isinstance(event, Finished):
                        return
        except OutriderError as error:
            record.fail(Failed(error))
            raise
        finally:
            record.end()
            requests.open_requests.remove()
            requests.cancel(stream, 0)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        session = OpenSession(self._requests, EventStream(asyncio.get_running_loop()))
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            while (batch := await session.next_batch(reader)) is not None:
                if batch:
                    events = [session_event(key, event) for key, event in batch]
                    yield pb.SessionResponse(events=events)
        finally:
            reader.cancel()
            session.cancel_all()

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        limits = self._engine.limits
        return pb.GetModelResponse(
            model_id=self._model.model_id,
            tokenizer_sha256=self._model.tokenizer_sha256,
            max_context_token_count=limits.max_sequence_tokens,
            vocab_size=limits.vocab_size,
            eos_token_ids=sorted(limits.eos_token_ids),
            draft_algorithms=self._engine.draft_algorithms,
            weight_version=self._engine.weight_version,
            output_fingerprint=self._model.output_fingerprint,
            speculation_detail=self._engine.speculation_detail,
            weight_changes=map(_change_message, self._model.changes.latest()),
        )


def _change_message(change: WeightChange) -> pb.WeightChange:
    message = pb.WeightChange(algorithm=change.algorithm, weight_version=change.version)
    message.change_time.FromNanoseconds(round(change.time_s * 1e9))
    return message
