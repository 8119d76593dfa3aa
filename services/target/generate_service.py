"""`TargetService`: prompts in, streams of tokens out. The adapter between gRPC and the engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from grpc import aio

from services.target.engine import Engine
from services.target.event_messages import response_message, session_event
from services.target.event_stream import EventStream
from services.target.open_requests import OpenRequests
from services.target.request import Failed, Finished, GenerationRequest
from services.target.step_loop import Clock
from shared.errors import InvalidArgument, OutriderError, Unavailable
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.rpc.lifecycle import Lifecycle, State
from shared.rpc.sampling import sampling_from_message, stop_from_message
from shared.telemetry.request_id import current_request_id, new_request_id

Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Identity of the model.

    Attributes:
        model_id: name clients pass as `model`.
        tokenizer_sha256: see `shared.tokenizer_files`.
    """

    model_id: str
    tokenizer_sha256: str


class TargetServicer(pb_grpc.TargetServiceServicer):
    """Serves one engine."""

    def __init__(
        self, engine: Engine, model: ServedModel, lifecycle: Lifecycle, clock: Clock
    ) -> None:
        self._engine = engine
        self._model = model
        self._lifecycle = lifecycle
        self._clock = clock
        self.open_requests = OpenRequests()

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        stream = EventStream(asyncio.get_running_loop())
        self._submit(request, current_request_id.get(), stream, key=0)
        self.open_requests.add()
        try:
            while True:
                for _, event in await stream.next_batch():
                    if isinstance(event, Failed):
                        raise event.error
                    yield response_message(event)
                    if isinstance(event, Finished):
                        return
        finally:
            self.open_requests.remove()
            self._engine.cancel(stream, 0)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        session = _Session(self, EventStream(asyncio.get_running_loop()))
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            while (batch := await session.next_batch(reader)) is not None:
                yield pb.SessionResponse(events=[session_event(key, event) for key, event in batch])
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
        )

    def submit(self, submit: pb.Submit, stream: EventStream) -> None:
        """Starts a request of a session.

        Raises:
            OutriderError: the request is refused; the session goes on.
        """
        request_id = submit.trace_request_id or new_request_id()
        self._submit(submit.request, request_id, stream, key=submit.request_id)

    def cancel(self, stream: EventStream, key: int) -> None:
        """Aborts a request of a session."""
        self._engine.cancel(stream, key)

    def _submit(
        self, message: pb.GenerateRequest, request_id: str, stream: EventStream, *, key: int
    ) -> None:
        if self._lifecycle.state is State.DRAINING:
            raise Unavailable.draining()
        self._engine.submit(self._request(message, request_id), stream, key)

    def _request(self, message: pb.GenerateRequest, request_id: str) -> GenerationRequest:
        limits = self._engine.limits
        limits.check_prompt(message.prompt_token_ids)
        wants_logprobs = message.HasField("top_logprob_count")
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=tuple(message.prompt_token_ids),
            sampling=sampling_from_message(message.sampling_params, draw_seed=_draw_seed),
            stop=stop_from_message(
                message.stop_params,
                max_output_tokens=limits.max_sequence_tokens - len(message.prompt_token_ids),
            ),
            arrival_s=self._clock(),
            top_logprobs=message.top_logprob_count if wants_logprobs else None,
            speculation_disabled=message.speculation_params.disabled,
        )


class _Session:
    """The requests of one session stream."""

    def __init__(self, servicer: TargetServicer, stream: EventStream) -> None:
        self._servicer = servicer
        self._stream = stream
        self._open: set[int] = set()

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Takes messages until the client half-closes.

        Raises:
            InvalidArgument: a request id is open already, or a message is empty.
        """
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "submit":
                self._submit(message.submit)
            elif kind == "cancel":
                self._close(message.cancel.request_id)
                self._servicer.cancel(self._stream, message.cancel.request_id)
            else:
                raise InvalidArgument.of(
                    "MESSAGE_EMPTY", "message", "a session message must submit or cancel"
                )

    async def next_batch(self, reader: asyncio.Task[None]) -> list[tuple[int, Any]] | None:
        """Returns the next events; None when the client half-closed and all is finished."""
        events = asyncio.ensure_future(self._stream.next_batch())
        try:
            while not events.done():
                if reader.done():
                    reader.result()
                    if not self._open:
                        return None
                waiting = [events] if reader.done() else [events, reader]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            batch = events.result()
        finally:
            events.cancel()
        for key, event in batch:
            if isinstance(event, Finished | Failed):
                self._close(key)
        return batch

    def cancel_all(self) -> None:
        """Aborts what still runs."""
        for key in tuple(self._open):
            self._close(key)
            self._servicer.cancel(self._stream, key)

    def _submit(self, submit: pb.Submit) -> None:
        key = submit.request_id
        if key in self._open:
            raise InvalidArgument.of(
                "REQUEST_ID_DUPLICATE", "request_id", f"request {key} is open on this session"
            )
        self._open.add(key)
        self._servicer.open_requests.add()
        try:
            self._servicer.submit(submit, self._stream)
        except OutriderError as error:
            self._stream.put(key, Failed(error))

    def _close(self, key: int) -> None:
        if key in self._open:
            self._open.remove(key)
            self._servicer.open_requests.remove()


def _draw_seed() -> int:
    """Returns a seed in [0, 2^63), which an int64 holds."""
    return secrets.randbits(63)
