"""The connection to one target: handshake, session, health watch and reconnection.

One stream of `TargetService.Session` carries all requests. Its messages of `outrider.target.v1`
become the gateway's plain data here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.failures import Aborted
from gateway.generation import Event, Finished, Generation, TargetModel, TargetState
from shared.errors import (
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    OutriderError,
    QueueFull,
    StatusCode,
    Unavailable,
    error_class,
)
from shared.generation import Delta, DraftAnswer, Failed, PromptScored, RoundTrace, Started
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.rpc.channel import open_channel
from shared.rpc.requests import grammar_message, sampling_message, stop_message, tree_from_message
from shared.tls import ClientTls
from shared.tokens import FinishReason, TokenLogprobs, WeightChange

Receive = Callable[[Event], None]
SessionCall = aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]

_log = logging.getLogger(__name__)
_MAX_UNSENT_MESSAGES = 16_384
_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_RETRYABLE = frozenset({StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE})


@dataclass(frozen=True, slots=True)
class _LiveRequest:
    on_event: Receive
    on_delta: Receive
    num_reserved_tokens: int


class SessionEnded(Exception):
    """The target closed the session without an error."""


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Waits of a link, in seconds.

    Attributes:
        call_timeout_s: timeout of `GetModel`.
        first_backoff_s: wait before the first reconnection; doubles with every failure in a row.
        longest_backoff_s: upper bound of the backoff, and the wait after a tokenizer mismatch.
    """

    call_timeout_s: float = 5.0
    first_backoff_s: float = 0.1
    longest_backoff_s: float = 5.0

    def backoff_s(self, num_failures: int) -> float:
        """Returns a random wait between half the bound and the bound, so that gateways do not all
        reconnect at once.

        Args:
            num_failures: failures in a row, at least 1.
        """
        doublings = min(num_failures - 1, 16)
        bound_s = min(self.first_backoff_s * 2**doublings, self.longest_backoff_s)
        return random.uniform(bound_s / 2, bound_s)


LINK_TIMING = LinkTiming()


class TargetLink:
    """Connection to one target. It reconnects for ever; live requests fail when it breaks.

    Attributes:
        state: only `SERVING` takes requests.
        detail: why the target does not serve; empty when it does.
        model: the model that the target serves; None before the first handshake.
        epoch: how often the target began to serve; what failed in one epoch may work in the next.
        num_reserved_tokens: most tokens the live requests can grow to.
        num_tokens: tokens received since the start.
    """

    def __init__(
        self,
        address: str,
        tokenizer_sha256: str,
        on_change: Callable[[], None],
        timing: LinkTiming,
        tls: ClientTls | None = None,
        model_name: str | None = None,
    ) -> None:
        """Args:
        model_name: clients' name of the model; None takes the target's own id.
        """
        self.address = address
        self.state = TargetState.CONNECTING
        self.detail = "not connected yet"
        self.model: TargetModel | None = None
        self.epoch = 0
        self.num_reserved_tokens = 0
        self.num_tokens = 0
        self._tokenizer_sha256 = tokenizer_sha256
        self._on_change = on_change
        self._timing = timing
        self._tls = tls
        self._model_name = model_name
        self._request_ids = itertools.count(1)
        self._live: dict[int, _LiveRequest] = {}
        self._unsent: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()

    @property
    def num_live(self) -> int:
        """Number of requests submitted and not ended."""
        return len(self._live)

    def submit(
        self, generation: Generation, on_event: Receive, on_delta: Receive | None = None
    ) -> int:
        """Sends a generation; its events go to `on_event`, the last one is Finished or Failed.

        Args:
            on_delta: gets the deltas, one every step; None sends them to `on_event`.

        Returns:
            The id to cancel it by.

        Raises:
            Unavailable: the target does not serve.
            QueueFull: the target does not read its session.
            InvalidArgument: the request cannot be encoded as protobuf.
        """
        if self.state is not TargetState.SERVING:
            message = f"target {self.address} is {self.state.value}: {self.detail}"
            raise Unavailable(message, reason="TARGET_UNAVAILABLE", retry_after_s=1.0)
        if self._unsent.qsize() >= _MAX_UNSENT_MESSAGES:
            raise QueueFull.of(self._unsent.qsize(), _MAX_UNSENT_MESSAGES)
        request_id = next(self._request_ids)
        try:
            request = submit_message(request_id, generation)
        except (ValueError, TypeError, OverflowError) as error:
            # A value that no check covers is too large or not Unicode. Nothing is counted yet.
            message = f"the request cannot be sent to a target: {error}"
            raise InvalidArgument(message, reason="REQUEST_UNENCODABLE") from error
        num_reserved = len(generation.prompt_token_ids) + generation.stop.max_output_tokens
        self._live[request_id] = _LiveRequest(on_event, on_delta or on_event, num_reserved)
        self.num_reserved_tokens += num_reserved
        self._unsent.put_nowait(request)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Cancels a request; does nothing when it has ended."""
        if self._forget(request_id):
            self._unsent.put_nowait(pb.SessionRequest(cancel=pb.Cancel(request_id=request_id)))

    async def ask_model(self) -> TargetModel | None:
        """Asks the target for its model, whose weights may have changed since the handshake, and
        updates `model` if the tokenizer is the same. Returns None when the target does not answer.
        """
        if self.state is not TargetState.SERVING:
            return None
        try:
            # A separate channel: the session's channel may close during the call.
            async with open_channel(self.address, self._tls) as channel:
                model = await self._get_model(channel)
        except aio.AioRpcError:
            return None
        if self.model is not None and model.tokenizer_sha256 == self.model.tokenizer_sha256:
            self.model = model
        return model

    async def run(self) -> None:
        """Connects and reconnects until cancelled."""
        num_failures = 0
        try:
            while True:
                epoch = self.epoch
                state, detail = await self._serve()
                num_failures = 1 if self.epoch > epoch else num_failures + 1
                self._disconnect(state, detail)
                is_mismatched = state is TargetState.MISMATCHED
                backoff_s = self._timing.backoff_s(num_failures)
                await asyncio.sleep(self._timing.longest_backoff_s if is_mismatched else backoff_s)
        finally:
            self._disconnect(TargetState.CLOSED, "the gateway is stopping")

    async def _serve(self) -> tuple[TargetState, str]:
        """Serves one connection until it breaks; returns the next state and the reason."""
        try:
            async with open_channel(self.address, self._tls) as channel:
                await self._handshake(channel)
                await self._run_session(channel)
        except aio.AioRpcError as error:
            return TargetState.CONNECTING, f"{error.code().name}: {error.details()}"
        except FailedPrecondition as error:
            return TargetState.MISMATCHED, error.message
        except SessionEnded:
            return TargetState.CONNECTING, "the target closed the session"
        except Exception as error:  # ending the task would end all reconnection
            _log.exception("the link to target %s failed", self.address)
            return TargetState.CONNECTING, f"{type(error).__name__} on the gateway; see its log"
        raise AssertionError("a session ends by raising only")

    async def _handshake(self, channel: aio.Channel) -> None:
        """Raises:
        FailedPrecondition: the target's tokenizer differs from the gateway's.
        """
        self.model = await self._get_model(channel)
        if self.model.tokenizer_sha256 != self._tokenizer_sha256:
            raise FailedPrecondition(
                f"target {self.address} has tokenizer {self.model.tokenizer_sha256}; "
                f"the gateway's is {self._tokenizer_sha256}",
                reason="TOKENIZER_MISMATCH",
            )

    async def _get_model(self, channel: aio.Channel) -> TargetModel:
        stub, timeout_s = pb_grpc.TargetServiceStub(channel), self._timing.call_timeout_s
        message = await stub.GetModel(pb.GetModelRequest(), timeout=timeout_s)
        return model_from_message(message, self._model_name or message.model_id)

    async def _run_session(self, channel: aio.Channel) -> None:
        """Runs the session and the health watch; when either ends, raises. `_disconnect` then fails
        the live requests."""
        self._unsent = asyncio.Queue()
        # The type stubs of grpc do not know calls without a request iterator.
        call: SessionCall = pb_grpc.TargetServiceStub(channel).Session()  # type: ignore[call-arg]
        tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call)),
            asyncio.create_task(self._watch_health(channel)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: SessionCall) -> None:
        """Passes events to their requests until the stream ends.

        Raises:
            SessionEnded, grpc.aio.AioRpcError: how the stream ended.
        """
        async for response in call:
            for request_id, event in events_from_response(response):
                request = self._live.get(request_id)
                if request is None:  # cancelled while the event was on the wire
                    continue
                if isinstance(event, Delta):
                    self.num_tokens += len(event.token_ids)
                    request.on_delta(event)
                    continue
                if not isinstance(event, (Started, PromptScored)):
                    self._forget(request_id)
                request.on_event(event)
        raise SessionEnded

    async def _write(self, call: SessionCall) -> None:
        """Sends submit and cancel messages; ends only when the task is cancelled."""
        with contextlib.suppress(asyncio.InvalidStateError):
            while True:
                await call.write(await self._unsent.get())
        await asyncio.Event().wait()  # the call is over; `_read` raises the reason

    async def _watch_health(self, channel: aio.Channel) -> None:
        """Follows the target's gRPC health status."""
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        try:
            async for response in stub.Watch(health_pb2.HealthCheckRequest()):
                if response.status == serving:
                    self._set_state(TargetState.SERVING, "")
                else:
                    name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
                    self._set_state(TargetState.NOT_SERVING, f"health is {name}")
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            self._set_state(TargetState.SERVING, "")
            await asyncio.Event().wait()  # `_read` notices when the target is gone
        raise SessionEnded

    def _forget(self, request_id: int) -> bool:
        """Removes a request; returns whether it was live."""
        request = self._live.pop(request_id, None)
        if request is not None:
            self.num_reserved_tokens -= request.num_reserved_tokens
        return request is not None

    def _disconnect(self, state: TargetState, detail: str) -> None:
        """Enters a state without service and fails the live requests, which another target may
        take."""
        self._set_state(state, detail)
        message = f"target {self.address} was lost: {detail}"
        error = Unavailable(message, reason="TARGET_LOST", retry_after_s=1.0)
        lost, self._live, self.num_reserved_tokens = self._live, {}, 0
        for request in lost.values():
            try:
                request.on_event(Failed(error, may_retry=True))
            except Exception:  # the other requests must still fail
                _log.exception("a request could not be told that its target was lost")

    def _set_state(self, state: TargetState, detail: str) -> None:
        if (state, detail) == (self.state, self.detail):
            return
        level = logging.ERROR if state is TargetState.MISMATCHED else logging.INFO
        _log.log(level, "target %s is %s%s", self.address, state.value, detail and f": {detail}")
        self.epoch += state is TargetState.SERVING
        self.state, self.detail = state, detail
        self._on_change()


def is_retryable(error: OutriderError) -> bool:
    """Returns whether another target may succeed where this error occurred."""
    return error.code in _RETRYABLE


def submit_message(request_id: int, generation: Generation) -> pb.SessionRequest:
    """Returns the message that starts a generation."""
    sampling = sampling_message(generation.sampling)
    if not generation.has_seed:
        sampling.ClearField("seed")
    request = pb.GenerateRequest(
        prompt_token_ids=generation.prompt_token_ids,
        sampling_params=sampling,
        stop_params=stop_message(generation.stop),
        top_logprob_count=generation.top_logprobs,
        priority=generation.priority,
        cache_salt=generation.cache_salt,
        predicted_token_ids=generation.predicted_token_ids,
        logprobs_after_temperature=generation.logprobs_after_temperature,
        logprob_token_ids=generation.logprob_token_ids,
        return_routed_experts=generation.wants_routes,
        speculation_params=pb.SpeculationParams(
            disabled=generation.speculation_disabled,
            trace=generation.wants_trace,
            algorithm=generation.draft_algorithm or "",
            step_count=generation.num_draft_steps,
            outcome_budget=generation.num_outcomes,
            draft_token_count=generation.num_draft_tokens,
            never_learnt=generation.never_learnt,
        ),
    )
    scoring = generation.prompt_scoring
    if scoring is not None:
        params = pb.PromptLogprobParams(
            start_position=scoring.start, top_logprob_count=scoring.num_top
        )
        request.prompt_logprob_params.CopyFrom(params)
    if generation.grammar is not None:
        request.grammar.CopyFrom(grammar_message(generation.grammar))
    submit = pb.Submit(
        request_id=request_id,
        request=request,
        trace_request_id=generation.request_id,
        traceparent=generation.traceparent or "",
    )
    if generation.timeout_s is not None:
        submit.timeout_duration.FromNanoseconds(round(generation.timeout_s * 1e9))
    return pb.SessionRequest(submit=submit)


def model_from_message(message: pb.GetModelResponse, name: str) -> TargetModel:
    """Returns the model that a target serves and clients call `name`."""
    return TargetModel(
        model_id=message.model_id,
        tokenizer_sha256=message.tokenizer_sha256,
        max_context_tokens=message.max_context_token_count,
        vocab_size=message.vocab_size,
        eos_token_ids=frozenset(message.eos_token_ids),
        draft_algorithms=tuple(message.draft_algorithms),
        weight_version=message.weight_version,
        speculation_detail=message.speculation_detail,
        output_fingerprint=message.output_fingerprint,
        weight_changes=tuple(
            WeightChange(
                change.change_time.ToNanoseconds() / 1e9, change.algorithm, change.weight_version
            )
            for change in message.weight_changes
        ),
        name=name,
    )


def events_from_response(response: pb.SessionResponse) -> Iterator[tuple[int, Event]]:
    """Yields the events of one step, each with the id of its request, in order."""
    deltas, start = response.deltas, 0
    # Every step has a delta for each request. Slices of columns cost a tenth of messages.
    token_ids = deltas.token_ids[:]
    for request_id, num_tokens, num_accepted, num_drafted in zip(
        deltas.request_ids[:],
        deltas.token_counts[:],
        deltas.accepted_token_counts[:],
        deltas.drafted_token_counts[:],
        strict=True,
    ):
        end = start + num_tokens
        yield request_id, Delta(token_ids[start:end], (), num_accepted, num_drafted)
        start = end
    for message in response.events:
        event = _event(message)
        if event is not None:
            yield message.request_id, event


def _event(message: pb.SessionEvent) -> Event | None:
    """Returns the event; None for an unknown kind, which a newer target may send."""
    response = message.response
    kind = response.WhichOneof("event")
    if kind == "delta" and response.delta.token_ids:
        return _delta(response.delta)
    if kind == "started":
        queue_s = response.started.queue_duration.ToNanoseconds() / 1e9
        return Started(response.started.cached_token_count, queue_s)
    if kind == "prompt_logprobs":
        scored = response.prompt_logprobs
        return PromptScored(scored.start_position, list(map(_logprobs, scored.logprobs)))
    if kind == "finished":
        return _finished(response.finished)
    return _failed(message.failure) if message.HasField("failure") else None


def _delta(message: pb.TokenDelta) -> Delta:
    return Delta(
        message.token_ids[:],
        list(map(_logprobs, message.logprobs)),
        message.accepted_token_count,
        message.drafted_token_count,
        _round(message.trace) if message.HasField("trace") else None,
        message.weight_version if message.HasField("weight_version") else None,
    )


def _round(message: pb.RoundTrace) -> RoundTrace:
    is_timed = message.HasField("draft_duration")
    response_s = message.draft_duration.ToNanoseconds() / 1e9 if is_timed else None
    return RoundTrace(
        round=message.round,
        tree=tree_from_message(message.tree),
        accepted_nodes=tuple(message.accepted_node_indices),
        num_rows=message.row_count,
        verify_s=message.verify_duration.ToNanoseconds() / 1e9,
        wait_s=message.wait_duration.ToNanoseconds() / 1e9,
        draft=DraftAnswer(message.algorithm, response_s) if message.algorithm else None,
    )


def _logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(message.top_token_ids, message.top_log_probs, strict=True))
    return TokenLogprobs(message.log_prob, message.rank, top)


def _finished(message: pb.GenerationFinished) -> Finished | Failed:
    reason = _FINISH_REASONS.get(message.finish_reason)
    if reason is None:  # not cancelled by the gateway, which forgets a request as it cancels it
        name = pb.FinishReason.Name(message.finish_reason)
        if message.finish_reason == pb.FINISH_REASON_CANCELLED:
            return Failed(Aborted("an operator ended the request", reason="REQUEST_ABORTED"))
        return Failed(Unavailable(f"the target ended the request: {name}", reason=name))
    return Finished(
        reason=reason,
        num_output_tokens=message.output_token_count,
        num_cached_tokens=message.cached_token_count,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        routes=message.routed_experts,
    )


def _failed(message: pb.RequestFailure) -> Failed:
    violations = (FieldViolation(message.field, message.message),) if message.field else ()
    has_delay = message.HasField("retry_delay")
    error = error_class(message.code)(
        message.message,
        reason=message.reason,
        violations=violations,
        retry_after_s=message.retry_delay.ToNanoseconds() / 1e9 if has_delay else None,
    )
    return Failed(error, may_retry=message.code in _RETRYABLE)
