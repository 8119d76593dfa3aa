"""`TargetService`: the adapter between gRPC and the engine. Prompts in, streams of tokens out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from google.protobuf.duration_pb2 import Duration
from grpc import aio

from services.target.requests.admission import Admission, KeyedEvent, OpenRequests, RequestRecord
from services.target.requests.request import Event, Finished, GenerationRequest, ModelLimits
from shared.errors import DeadlineExceeded, EngineFailed, InvalidArgument, OutriderError
from shared.generation import Delta, Failed, PromptScored, PromptScoring, RoundTrace, Started
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.rpc.requests import (
    grammar_from_message,
    sampling_from_message,
    stop_from_message,
    tree_message,
)
from shared.sampling_defaults import OUTCOMES, TREE_STEPS, TREE_TOKENS, drawn_seed
from shared.telemetry.tracing import current_request_id, current_traceparent, new_request_id
from shared.tokens import FinishReason, TokenLogprobs, WeightChange

logger = logging.getLogger(__name__)


def generation_request(
    message: pb.GenerateRequest, record: RequestRecord, limits: ModelLimits, arrival_s: float
) -> GenerationRequest:
    """Returns the request without its grammar, which takes time to compile.

    Raises:
        InvalidArgument: a field is out of range.
    """
    limits.check_prompt(message.prompt_token_ids)
    wants_logprobs, params = message.HasField("top_logprob_count"), message.speculation_params
    scoring = message.prompt_logprob_params
    return GenerationRequest(
        request_id=record.request_id,
        traceparent=record.traceparent,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_message(message.sampling_params, draw_seed=drawn_seed),
        stop=stop_from_message(
            message.stop_params,
            max_output_tokens=limits.max_sequence_tokens - len(message.prompt_token_ids),
        ),
        arrival_s=arrival_s,
        top_logprobs=message.top_logprob_count if wants_logprobs else None,
        # A tree of one row has only its root.
        speculation_disabled=params.disabled or params.draft_token_count == 1,
        draft_algorithm=params.algorithm or None,
        num_draft_steps=TREE_STEPS.checked(params.step_count)
        if params.HasField("step_count")
        else None,
        num_draft_tokens=TREE_TOKENS.checked(params.draft_token_count)
        if params.HasField("draft_token_count")
        else None,
        num_outcomes=OUTCOMES.checked(params.outcome_budget)
        if params.HasField("outcome_budget")
        else None,
        wants_trace=params.trace,
        never_learnt=params.never_learnt,
        priority=message.priority,
        prompt_scoring=PromptScoring(scoring.start_position, scoring.top_logprob_count)
        if message.HasField("prompt_logprob_params")
        else None,
        logprobs_after_temperature=message.logprobs_after_temperature,
        cache_salt=message.cache_salt,
        logprob_token_ids=tuple(message.logprob_token_ids),
        predicted_token_ids=tuple(message.predicted_token_ids),
        wants_routes=message.return_routed_experts,
    )


_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


def response_message(event: Started | PromptScored | Delta | Finished) -> pb.GenerateResponse:
    """Returns the message of one event."""
    if isinstance(event, Delta):
        return pb.GenerateResponse(delta=_delta(event))
    if isinstance(event, PromptScored):
        logprobs = map(_logprobs, event.logprobs)
        scored = pb.PromptLogprobs(start_position=event.start, logprobs=logprobs)
        return pb.GenerateResponse(prompt_logprobs=scored)
    if isinstance(event, Started):
        queue_duration = duration_message(event.queue_s)
        started = pb.GenerationStarted(
            cached_token_count=event.num_cached_tokens, queue_duration=queue_duration
        )
        return pb.GenerateResponse(started=started)
    return pb.GenerateResponse(finished=_finished(event))


def session_responses(batch: Iterable[tuple[int, Event]]) -> Iterator[pb.SessionResponse]:
    """Yields the events of a session's requests, each with its request's id, in few messages.

    Plain deltas are sent as columns: every step has a delta for every request, and a message for
    each would cost twenty times as much. In a message the columns come before the events, so a
    delta that follows an event of the same request begins another message.
    """
    events, deltas, with_event = list[pb.SessionEvent](), list[tuple[int, Delta]](), set[int]()
    for key, event in batch:
        if isinstance(event, Delta) and event.is_plain:
            if key in with_event:
                yield _session_response(events, deltas)
                events, deltas, with_event = [], [], set()
            deltas.append((key, event))
            continue
        with_event.add(key)
        if isinstance(event, Failed):
            events.append(pb.SessionEvent(request_id=key, failure=_failure(event.error)))
        else:
            events.append(pb.SessionEvent(request_id=key, response=response_message(event)))
    if events or deltas:
        yield _session_response(events, deltas)


def _session_response(
    events: list[pb.SessionEvent], deltas: list[tuple[int, Delta]]
) -> pb.SessionResponse:
    """Returns a message of plain deltas and the events behind them. Each column is written at once;
    number by number it would cost four times as much."""
    if not deltas:
        return pb.SessionResponse(events=events)
    columns = pb.TokenDeltas(
        request_ids=[key for key, _ in deltas],
        token_counts=[len(delta.token_ids) for _, delta in deltas],
        token_ids=[token_id for _, delta in deltas for token_id in delta.token_ids],
        accepted_token_counts=[delta.num_accepted for _, delta in deltas],
        drafted_token_counts=[delta.num_drafted for _, delta in deltas],
    )
    return pb.SessionResponse(events=events, deltas=columns)


def _delta(delta: Delta) -> pb.TokenDelta:
    return pb.TokenDelta(
        trace=None if delta.trace is None else _trace(delta.trace),
        token_ids=delta.token_ids,
        logprobs=map(_logprobs, delta.logprobs),
        accepted_token_count=delta.num_accepted,
        drafted_token_count=delta.num_drafted,
        weight_version=delta.weight_version,
    )


def _trace(trace: RoundTrace) -> pb.RoundTrace:
    draft = trace.draft
    response_s = None if draft is None else draft.response_s
    return pb.RoundTrace(
        round=trace.round,
        tree=tree_message(trace.tree),
        accepted_node_indices=trace.accepted_nodes,
        row_count=trace.num_rows,
        verify_duration=duration_message(trace.verify_s),
        wait_duration=duration_message(trace.wait_s),
        algorithm=None if draft is None else draft.algorithm,
        draft_duration=None if response_s is None else duration_message(response_s),
    )


def duration_message(duration_s: float) -> Duration:
    """Returns a duration, rounded to nanoseconds."""
    duration = Duration()
    duration.FromNanoseconds(round(duration_s * 1e9))
    return duration


def _logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        log_prob=logprobs.log_prob,
        rank=logprobs.rank,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_log_probs=[log_prob for _, log_prob in logprobs.top],
    )


def _finished(event: Finished) -> pb.GenerationFinished:
    stats = event.stats
    return pb.GenerationFinished(
        finish_reason=_FINISH_REASONS[event.reason],
        prompt_token_count=event.num_prompt_tokens,
        output_token_count=event.num_output_tokens,
        cached_token_count=event.num_cached_tokens,
        stop_token_id=event.stop_token_id,
        speculation=pb.SpeculationStats(
            round_count=stats.num_rounds,
            verified_round_count=stats.num_verified_rounds,
            drafted_token_count=stats.num_drafted,
            accepted_token_count=stats.num_accepted,
            missed_round_count=stats.num_missed_rounds,
            acceptance_histogram=stats.histogram,
        ),
        routed_experts=b"" if event.routes is None else event.routes.read().numpy().tobytes(),
    )


def _failure(error: OutriderError) -> pb.RequestFailure:
    delay_s = error.retry_after_s
    return pb.RequestFailure(
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        field=error.violations[0].field if error.violations else "",
        retry_delay=None if delay_s is None else duration_message(delay_s),
    )


_MAX_CHANGES = 64


class OpenSession(OpenRequests):
    """The requests of one session, keyed by the ids that the client chose."""

    def __init__(self, admission: Admission) -> None:
        super().__init__(admission)
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._compiling: dict[int, asyncio.Task[None]] = {}
        self._reader: asyncio.Future[None] | None = None

    def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Starts to read messages, until the client half-closes."""
        self._reader = asyncio.ensure_future(self._read(requests))
        self._reader.add_done_callback(lambda _: self.stream.wake())

    async def next_batch(self) -> list[KeyedEvent] | None:
        """Returns the next events; None when the client has half-closed and all requests ended.

        Raises:
            InvalidArgument: a request id is open already, or a message is empty.
        """
        assert self._reader is not None
        if self._reader.done():
            self._reader.result()
            if not self._records:
                return None
        return [
            (key, event) for key, event in await self.stream.next_batch() if self.take(key, event)
        ]

    def submit(self, submit: pb.Submit) -> Coroutine[Any, Any, None]:
        """Opens a request; returns the coroutine that starts it, or fails it by an event.

        Raises:
            InvalidArgument: a request with its id is open.
        """
        key = submit.request_id
        if key in self._records:
            raise InvalidArgument.of(
                "REQUEST_ID_DUPLICATE", "request_id", f"request {key} is open on this session"
            )
        num_prompt = len(submit.request.prompt_token_ids)
        request_id = submit.trace_request_id or new_request_id()
        record = self.begin(key, request_id, num_prompt, submit.traceparent or None)
        timeout_s = None
        if submit.HasField("timeout_duration"):
            timeout_s = submit.timeout_duration.ToNanoseconds() / 1e9
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(timeout_s, self._expire, key, timeout_s)
        return self._submit(submit, record, timeout_s)

    def close(self) -> None:
        """Stops reading, and cancels the open requests."""
        if self._reader is not None:
            self._reader.cancel()
        self.cancel_all()

    async def _read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "submit":
                key, submitting = message.submit.request_id, self.submit(message.submit)
                if message.submit.request.HasField("grammar"):  # other requests do not wait for it
                    task = self._compiling[key] = asyncio.create_task(submitting)
                    task.add_done_callback(partial(self._compiling.pop, key))
                else:
                    await submitting
            elif kind == "cancel":
                self.cancel(message.cancel.request_id)
            else:
                raise InvalidArgument.of(
                    "MESSAGE_EMPTY", "message", "a session message must submit or cancel"
                )

    async def _submit(
        self, submit: pb.Submit, record: RequestRecord, timeout_s: float | None
    ) -> None:
        try:
            if timeout_s is not None and timeout_s <= 0.0:
                problem = f"timeout_duration is {timeout_s:g} s; it must be above 0"
                raise InvalidArgument.of("TIMEOUT_OUT_OF_RANGE", "timeout_duration", problem)
            self.stream.check_room()
            admission, message = self.admission, submit.request
            admission.lifecycle.check_open()
            limits, now_s = admission.engine.limits, admission.telemetry.clock()
            request = generation_request(message, record, limits, now_s)
            if message.HasField("grammar"):
                compiled = await admission.grammars.compile(grammar_from_message(message.grammar))
                request = replace(request, grammar=compiled)
            admission.engine.submit(request, self.stream, submit.request_id)
        except OutriderError as error:
            self.stream.put([(submit.request_id, Failed(error))])
        except Exception:
            # It must fail this request alone, and must not leave its client waiting.
            logger.exception("request %s failed before it was queued", record.request_id)
            self.stream.put([(submit.request_id, Failed(EngineFailed.of()))])

    def _expire(self, key: int, timeout_s: float) -> None:
        message = f"the request took longer than the {timeout_s:g} s it was given"
        self.end(key, Failed(DeadlineExceeded(message, reason="DEADLINE_EXCEEDED")))

    def _stop(self, key: int) -> None:
        if (compiling := self._compiling.pop(key, None)) is not None:
            compiling.cancel()
        super()._stop(key)

    def _close(self, key: int) -> None:
        super()._close(key)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()


Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Identity of the model.

    Attributes:
        model_id: name that clients pass as `model`.
        tokenizer_sha256: see `shared.model_files`.
        output_fingerprint: see `services.target.process`.
        changes: the latest changes of its weights, and of its drafts' weights.
    """

    model_id: str
    tokenizer_sha256: str
    output_fingerprint: str = ""
    changes: deque[WeightChange] = field(default_factory=lambda: deque(maxlen=_MAX_CHANGES))

    def note_change(self, algorithm: str, version: str) -> None:
        """Records that new weights are used from now on: those of a draft, or of the model if
        `algorithm` is empty. Called on any thread."""
        self.changes.append(WeightChange(time.time(), algorithm, version))


class TargetServicer(pb_grpc.TargetServiceServicer):
    """Serves one engine."""

    def __init__(self, admission: Admission, model: ServedModel) -> None:
        self._admission = admission
        self._engine = admission.engine
        self._model = model

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        session = OpenSession(self._admission)
        request_id, parent = current_request_id.get(), current_traceparent.get()
        submit = pb.Submit(request=request, trace_request_id=request_id, traceparent=parent or "")
        try:
            await session.submit(submit)
            while True:
                for key, event in await session.stream.next_batch():
                    session.take(key, event)
                    if isinstance(event, Failed):
                        raise event.error
                    yield response_message(event)
                    if isinstance(event, Finished):
                        return
        finally:
            session.close()

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        session = OpenSession(self._admission)
        session.read(request_iterator)
        try:
            while (batch := await session.next_batch()) is not None:
                for response in session_responses(batch):
                    yield response
        finally:
            session.close()

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
            weight_changes=map(_change_message, tuple(self._model.changes)),
        )


def _change_message(change: WeightChange) -> pb.WeightChange:
    message = pb.WeightChange(algorithm=change.algorithm, weight_version=change.version)
    message.change_time.FromNanoseconds(round(change.time_s * 1e9))
    return message
