"""`TargetService`: prompts in, streams of tokens out. The adapter between gRPC and the engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from grpc import aio

from services.target.adaptive_config import MAX_STEPS
from services.target.engine import Engine
from services.target.event_messages import response_message, session_event
from services.target.event_stream import EventStream
from services.target.grammars.compiler import GrammarCompiler
from services.target.open_requests import OpenRequests
from services.target.request import Event, Failed, Finished, GenerationRequest, PromptScoring
from services.target.request_record import RequestRecord, RequestRecorder
from shared.errors import DeadlineExceeded, InvalidArgument, OutriderError, Unavailable
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.rpc.grammar import grammar_from_message
from shared.rpc.lifecycle import Lifecycle, State
from shared.rpc.sampling import sampling_from_message, stop_from_message
from shared.seeds import drawn_seed
from shared.telemetry.request_id import current_request_id, current_traceparent, new_request_id

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
        self,
        engine: Engine,
        model: ServedModel,
        grammars: GrammarCompiler,
        lifecycle: Lifecycle,
        recorder: RequestRecorder,
    ) -> None:
        self._engine = engine
        self._model = model
        self._grammars = grammars
        self._lifecycle = lifecycle
        self._recorder = recorder
        self.open_requests = OpenRequests()

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        stream = EventStream(asyncio.get_running_loop())
        record = self._record(request, current_request_id.get(), current_traceparent.get())
        self.open_requests.add()
        try:
            await self._submit(request, record, stream, key=0)
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
            self.open_requests.remove()
            self._engine.cancel(stream, 0)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        session = _Session(self, EventStream(asyncio.get_running_loop()))
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
        )

    def record(self, submit: pb.Submit) -> RequestRecord:
        """Begins the record of a request of a session."""
        request_id = submit.trace_request_id or new_request_id()
        return self._record(submit.request, request_id, submit.traceparent or None)

    async def submit(self, submit: pb.Submit, record: RequestRecord, stream: EventStream) -> None:
        """Starts a request of a session; waits only for its grammar, if it has one.

        Raises:
            OutriderError: the request is refused; the session goes on.
        """
        await self._submit(submit.request, record, stream, key=submit.request_id)

    def cancel(self, stream: EventStream, key: int) -> None:
        """Aborts a request of a session."""
        self._engine.cancel(stream, key)

    def _record(
        self, message: pb.GenerateRequest, request_id: str, parent: str | None
    ) -> RequestRecord:
        return self._recorder.begin(request_id, len(message.prompt_token_ids), parent)

    async def _submit(
        self, message: pb.GenerateRequest, record: RequestRecord, stream: EventStream, *, key: int
    ) -> None:
        if self._lifecycle.state is State.DRAINING:
            raise Unavailable.draining()
        request = self._request(message, record)
        if message.HasField("grammar"):
            grammar = await self._grammars.compile(grammar_from_message(message.grammar))
            request = dataclasses.replace(request, grammar=grammar)
        self._engine.submit(request, stream, key)

    def _request(self, message: pb.GenerateRequest, record: RequestRecord) -> GenerationRequest:
        limits = self._engine.limits
        limits.check_prompt(message.prompt_token_ids)
        wants_logprobs = message.HasField("top_logprob_count")
        return GenerationRequest(
            request_id=record.request_id,
            traceparent=record.traceparent,
            prompt_token_ids=tuple(message.prompt_token_ids),
            sampling=sampling_from_message(message.sampling_params, draw_seed=drawn_seed),
            stop=stop_from_message(
                message.stop_params,
                max_output_tokens=limits.max_sequence_tokens - len(message.prompt_token_ids),
            ),
            arrival_s=self._recorder.clock(),
            top_logprobs=message.top_logprob_count if wants_logprobs else None,
            speculation_disabled=message.speculation_params.disabled,
            draft_algorithm=message.speculation_params.algorithm or None,
            num_draft_steps=_draft_steps(message.speculation_params),
            wants_trace=message.speculation_params.trace,
            priority=message.priority,
            prompt_scoring=_prompt_scoring(message),
        )


def _draft_steps(params: pb.SpeculationParams) -> int | None:
    """Raises:
    InvalidArgument: the depth is out of range.
    """
    if not params.HasField("step_count"):
        return None
    if not 1 <= params.step_count <= MAX_STEPS:
        raise InvalidArgument.out_of_range(
            "speculation.num_steps", params.step_count, f"[1, {MAX_STEPS}]"
        )
    return params.step_count


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """A request of a session.

    Attributes:
        timer: ends it when its time is over; None when it has as much as it likes.
    """

    record: RequestRecord
    timer: asyncio.TimerHandle | None

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.record.end()


class _Session:
    """The requests of one session stream."""

    def __init__(self, servicer: TargetServicer, stream: EventStream) -> None:
        self._servicer = servicer
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
                await self._open_request(message.submit)
            elif kind == "cancel":
                self._close(message.cancel.request_id)
                self._cancel(message.cancel.request_id)
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
        return [(key, event) for key, event in batch if self._take(key, event)]

    def cancel_all(self) -> None:
        """Aborts what still runs."""
        for key in tuple(self._open):
            self._close(key)
            self._cancel(key)

    async def _open_request(self, submit: pb.Submit) -> None:
        """Starts a request; one with a grammar on the side, so that others need not wait for it."""
        key = submit.request_id
        if key in self._open:
            raise InvalidArgument.of(
                "REQUEST_ID_DUPLICATE", "request_id", f"request {key} is open on this session"
            )
        record = self._servicer.record(submit)
        self._open[key] = _OpenRequest(record, self._timer(submit))
        self._servicer.open_requests.add()
        if not submit.request.HasField("grammar"):
            await self._submit(submit, record)
            return
        task = asyncio.create_task(self._submit(submit, record))
        self._compiling[key] = task
        task.add_done_callback(lambda _: self._compiling.pop(key, None))

    async def _submit(self, submit: pb.Submit, record: RequestRecord) -> None:
        try:
            self._stream.check_room()
            await self._servicer.submit(submit, record, self._stream)
        except OutriderError as error:
            self._stream.put(submit.request_id, Failed(error))

    def _cancel(self, key: int) -> None:
        compiling = self._compiling.pop(key, None)
        if compiling is not None:
            compiling.cancel()
        self._servicer.cancel(self._stream, key)

    def _take(self, key: int, event: Event) -> bool:
        """Records an event; False when it is about a request that was cancelled or timed out."""
        request = self._open.get(key)
        if request is None:
            return False
        request.record.observe(event)
        if isinstance(event, Finished | Failed):
            self._close(key)
        return True

    def _timer(self, submit: pb.Submit) -> asyncio.TimerHandle | None:
        if not submit.HasField("timeout_duration"):
            return None
        timeout_s = submit.timeout_duration.ToNanoseconds() / 1e9
        loop = asyncio.get_running_loop()
        return loop.call_later(timeout_s, self._expire, submit.request_id, timeout_s)

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
            request.end()
            self._servicer.open_requests.remove()


def _prompt_scoring(message: pb.GenerateRequest) -> PromptScoring | None:
    if not message.HasField("prompt_logprob_params"):
        return None
    params = message.prompt_logprob_params
    return PromptScoring(params.start_position, params.top_logprob_count)
