"""`TargetService`: prompts in, streams of tokens out. The adapter between gRPC and the engine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from grpc import aio

from services.target.requests.admission import Admission, RequestRecord
from services.target.requests.event_stream import EventStream, KeyedEvent
from services.target.requests.request import Event, Finished
from services.target.requests.request_messages import (
    generation_request,
    response_message,
    session_responses,
)
from shared.errors import DeadlineExceeded, InvalidArgument, OutriderError
from shared.generation import Failed
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.rpc.requests import grammar_from_message
from shared.telemetry.tracing import current_request_id, current_traceparent, new_request_id
from shared.tokens import WeightChange

MOST = 64
"""Changes that are kept, the latest."""


class WeightChanges:
    """Written by any thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._latest = deque[WeightChange](maxlen=MOST)

    def note(self, algorithm: str, version: str) -> None:
        """Weights are in force from now on."""
        self._latest.append(WeightChange(self._clock(), algorithm, version))

    def latest(self) -> tuple[WeightChange, ...]:
        """Returns changes, oldest first."""
        return tuple(self._latest)


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """A request of a session.

    Attributes:
        timer: ends it when its time is over; None when it has as much as it likes.
    """

    record: RequestRecord
    timer: asyncio.TimerHandle | None


class OpenSession:
    """The requests of one session. On the event loop.

    Args:
        stream: of the events of all of them, keyed by the ids that the client chose.
    """

    def __init__(self, admission: Admission, stream: EventStream) -> None:
        self._admission = admission
        self._stream = stream
        self._open: dict[int, _OpenRequest] = {}
        self._compiling: dict[int, asyncio.Task[None]] = {}

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Takes messages until the client half-closes.

        Raises:
            InvalidArgument: a request id is open already, or a message is empty.
        """
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "submit":
                key, submitting = message.submit.request_id, self.open(message.submit)
                if message.submit.request.HasField("grammar"):  # others need not wait for it
                    task = self._compiling[key] = asyncio.create_task(submitting)
                    task.add_done_callback(partial(self._compiling.pop, key))
                else:
                    await submitting
            elif kind == "cancel":
                self._close(message.cancel.request_id)
                self._cancel(message.cancel.request_id)
            else:
                raise InvalidArgument.of(
                    "MESSAGE_EMPTY", "message", "a session message must submit or cancel"
                )

    async def next_batch(self, reader: asyncio.Task[None]) -> list[KeyedEvent] | None:
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
        return [(key, event) for key, event in batch if self.take(key, event)]

    def cancel_all(self) -> None:
        """Aborts what still runs."""
        for key in tuple(self._open):
            self._close(key)
            self._cancel(key)

    def open(self, submit: pb.Submit) -> Coroutine[Any, Any, None]:
        """Opens a request; returns what starts it. What is refused then fails by an event.

        Raises:
            InvalidArgument: its id is that of an open request.
        """
        key = submit.request_id
        if key in self._open:
            raise InvalidArgument.of(
                "REQUEST_ID_DUPLICATE", "request_id", f"request {key} is open on this session"
            )
        record = RequestRecord(
            self._admission.telemetry,
            submit.trace_request_id or new_request_id(),
            len(submit.request.prompt_token_ids),
            submit.traceparent or None,
        )
        timeout_s, timer = None, None
        if submit.HasField("timeout_duration"):
            timeout_s = submit.timeout_duration.ToNanoseconds() / 1e9
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, self._expire, key, timeout_s)
        self._open[key] = _OpenRequest(record, timer)
        self._admission.open_requests.add()
        return self._submit(submit, record, timeout_s)

    async def _submit(
        self, submit: pb.Submit, record: RequestRecord, timeout_s: float | None
    ) -> None:
        try:
            if timeout_s is not None and timeout_s <= 0.0:
                message = f"timeout_duration is {timeout_s:g} s; it must be above 0"
                raise InvalidArgument.of("TIMEOUT_OUT_OF_RANGE", "timeout_duration", message)
            self._stream.check_room()
            admission, asked = self._admission, submit.request
            admission.lifecycle.check_open()
            limits, now_s = admission.engine.limits, admission.telemetry.clock()
            request = generation_request(asked, record, limits, now_s)
            if asked.HasField("grammar"):
                compiled = await admission.grammars.compile(grammar_from_message(asked.grammar))
                request = replace(request, grammar=compiled)
            admission.engine.submit(request, self._stream, submit.request_id)
        except OutriderError as error:
            self._stream.put(submit.request_id, Failed(error))

    def _cancel(self, key: int) -> None:
        compiling = self._compiling.pop(key, None)
        if compiling is not None:
            compiling.cancel()
        self._admission.engine.cancel(self._stream, key)

    def take(self, key: int, event: Event) -> bool:
        """Records an event; False when it is about a request that was cancelled or timed out."""
        request = self._open.get(key)
        if request is None:
            return False
        request.record.observe(event)
        if isinstance(event, Finished | Failed):
            self._close(key)
        return True

    def _expire(self, key: int, timeout_s: float) -> None:
        """Ends a request whose time is over, wherever it is: queued, computing, or unread."""
        self._cancel(key)
        error = DeadlineExceeded(
            f"the request took longer than the {timeout_s:g} s it was given",
            reason="DEADLINE_EXCEEDED",
        )
        self._stream.put(key, Failed(error))

    def _close(self, key: int) -> None:
        request = self._open.pop(key, None)
        if request is not None:
            if request.timer is not None:
                request.timer.cancel()
            request.record.end()
            self._admission.open_requests.remove()


Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Identity of the model.

    Attributes:
        model_id: name clients pass as `model`.
        tokenizer_sha256: see `shared.model_files`.
        output_fingerprint: see `services.target.process`.
        changes: of its weights, and of its drafts'.
    """

    model_id: str
    tokenizer_sha256: str
    output_fingerprint: str = ""
    changes: WeightChanges = field(default_factory=WeightChanges)


class TargetServicer(pb_grpc.TargetServiceServicer):
    """Serves one engine."""

    def __init__(self, admission: Admission, model: ServedModel) -> None:
        self._admission = admission
        self._engine = admission.engine
        self._model = model

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        stream = EventStream(asyncio.get_running_loop())
        session = OpenSession(self._admission, stream)
        request_id, parent = current_request_id.get(), current_traceparent.get()
        submit = pb.Submit(request=request, trace_request_id=request_id, traceparent=parent or "")
        try:
            await session.open(submit)
            while True:
                for key, event in await stream.next_batch():
                    session.take(key, event)
                    if isinstance(event, Failed):
                        raise event.error
                    yield response_message(event)
                    if isinstance(event, Finished):
                        return
        finally:
            session.cancel_all()

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        session = OpenSession(self._admission, EventStream(asyncio.get_running_loop()))
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            while (batch := await session.next_batch(reader)) is not None:
                for response in session_responses(batch):
                    yield response
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
