"""A target without a model: a real gRPC server whose tokens come from a function of the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from grpc import aio

from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.rpc.server import Lifecycle, bind, create_server
from shared.tls import ServerTls

_SERVICE = pb.DESCRIPTOR.services_by_name["TargetService"]

Steps = Iterable[Sequence[int]]
"""Token ids of each engine step. All but the last token of a step count as accepted drafts."""

Reply = Callable[[pb.GenerateRequest], Steps]


def prompt_again(request: pb.GenerateRequest) -> Steps:
    """The default reply: the prompt's tokens repeated, three per step, up to the output limit."""
    prompt = list(request.prompt_token_ids)
    num_steps = request.stop_params.max_output_token_count // 3 + 1
    endless = prompt * (3 * num_steps // len(prompt) + 1)
    return [endless[3 * i : 3 * i + 3] for i in range(num_steps)]


@dataclass
class FakeTarget:
    """Serves `TargetService` on a free port.

    Attributes:
        reply: the tokens of a request; cut to its limits and at its stop tokens.
        is_mute: requests get no event at all.
        refusals: failures for the next submits, one each, in order, before any event.
        hold_after: a request stops after so many steps until `release` is set.
        submits: every request that arrived, in order.
        cancelled: ids of all cancelled requests, in order, also unknown ids.
        num_sessions: session streams opened so far.
    """

    tokenizer_sha256: str
    reply: Reply = prompt_again
    model_id: str = "fake"
    max_context_tokens: int = 4096
    vocab_size: int = 512
    eos_token_ids: tuple[int, ...] = (0,)
    draft_algorithms: tuple[str, ...] = ()
    speculation_detail: str = ""
    num_cached_tokens: int = 0
    hold_after: int | None = None
    is_mute: bool = False
    refusals: list[pb.RequestFailure] = field(default_factory=list)
    submits: list[pb.Submit] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    num_sessions: int = 0
    tls: ServerTls | None = None

    def __post_init__(self) -> None:
        self.release = asyncio.Event()
        self.lifecycle = Lifecycle([_SERVICE.full_name])
        self.port = 0
        self._changed = asyncio.Condition()
        self._sessions: set[_Session] = set()
        self._server: aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        """Requests that are being generated now."""
        return sum(session.num_open for session in self._sessions)

    async def start(self, port: int = 0) -> None:
        servicer = _Servicer(self)

        def register(server: aio.Server) -> None:
            pb_grpc.add_TargetServiceServicer_to_server(servicer, server)

        self._server = await create_server([_SERVICE], register, self.lifecycle)
        self.port = bind(self._server, f"127.0.0.1:{port}", self.tls)
        await self._server.start()
        await self.lifecycle.activate()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0.0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Waits until submits and cancels make `predicate` true."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(predicate), 60.0)

    async def break_sessions(self) -> None:
        """Ends every session stream with UNAVAILABLE, as a dying process would."""
        for session in tuple(self._sessions):
            session.outgoing.put_nowait(None)

    async def note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def model(self) -> pb.GetModelResponse:
        return pb.GetModelResponse(
            model_id=self.model_id,
            tokenizer_sha256=self.tokenizer_sha256,
            max_context_token_count=self.max_context_tokens,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            draft_algorithms=self.draft_algorithms,
            speculation_detail=self.speculation_detail,
        )

    async def open_session(self, session: _Session) -> None:
        self.num_sessions += 1
        self._sessions.add(session)
        await self.note()

    def close_session(self, session: _Session) -> None:
        self._sessions.discard(session)


class _Servicer(pb_grpc.TargetServiceServicer):
    def __init__(self, target: FakeTarget) -> None:
        self._target = target

    async def GetModel(
        self, request: pb.GetModelRequest, context: aio.ServicerContext[Any, Any]
    ) -> pb.GetModelResponse:
        return self._target.model()

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.SessionResponse]:
        session = _Session(self._target)
        await self._target.open_session(session)
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            while True:
                batch = [await session.outgoing.get()]
                while not session.outgoing.empty():
                    batch.append(session.outgoing.get_nowait())
                yield pb.SessionResponse(events=[event for event in batch if event is not None])
                if None in batch:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the process is gone")
        finally:
            reader.cancel()
            session.cancel_all()
            self._target.close_session(session)


class _Session:
    """One session stream: a task for each live request."""

    def __init__(self, target: FakeTarget) -> None:
        self.outgoing: asyncio.Queue[pb.SessionEvent | None] = asyncio.Queue()
        self._target = target
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        async for request in requests:
            if request.HasField("submit"):
                self._submit(request.submit)
            else:
                self._target.cancelled.append(request.cancel.request_id)
                task = self._tasks.pop(request.cancel.request_id, None)
                if task is not None:
                    task.cancel()
            await self._target.note()

    def cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _submit(self, submit: pb.Submit) -> None:
        self._target.submits.append(submit)
        if self._target.refusals:
            self._put(submit, failure=self._target.refusals.pop(0))
        elif not self._target.is_mute:
            self._tasks[submit.request_id] = asyncio.create_task(self._generate(submit))

    def _put(self, submit: pb.Submit, **outcome: Any) -> None:
        self.outgoing.put_nowait(pb.SessionEvent(request_id=submit.request_id, **outcome))

    async def _generate(self, submit: pb.Submit) -> None:
        target, request = self._target, submit.request
        started = pb.GenerationStarted(cached_token_count=target.num_cached_tokens)
        self._put(submit, response=pb.GenerateResponse(started=started))
        for event in _prompt_logprobs(request):
            self._put(submit, response=pb.GenerateResponse(prompt_logprobs=event))
            await asyncio.sleep(0)
        finished = pb.GenerationFinished(
            finish_reason=pb.FINISH_REASON_LENGTH,
            prompt_token_count=len(request.prompt_token_ids),
            cached_token_count=target.num_cached_tokens,
        )
        for number, step in enumerate(_steps(request, target.reply(request))):
            if number == target.hold_after:
                await target.release.wait()
            taken = _within_limits(request, step, finished, target.eos_token_ids)
            self._put(submit, response=pb.GenerateResponse(delta=_delta(request, taken, finished)))
            await asyncio.sleep(0)
            while not self.outgoing.empty():  # so that each step gets its own message
                await asyncio.sleep(0)
            if _is_over(request, finished):
                break
        self._put(submit, response=pb.GenerateResponse(finished=finished))
        self._tasks.pop(submit.request_id, None)


def _prompt_logprobs(request: pb.GenerateRequest) -> list[pb.PromptLogprobs]:
    """Returns events of three tokens each, like those of a chunked prefill."""
    if not request.HasField("prompt_logprob_params"):
        return []
    params, prompt = request.prompt_logprob_params, request.prompt_token_ids
    return [
        pb.PromptLogprobs(
            start_position=start,
            logprobs=[
                _logprobs(token_id, params.top_logprob_count, request.logprob_token_ids)
                for token_id in prompt[start : start + 3]
            ],
        )
        for start in range(max(params.start_position, 1), len(prompt), 3)
    ]


def _steps(request: pb.GenerateRequest, steps: Steps) -> Steps:
    if request.speculation_params.disabled:
        return [[token_id] for step in steps for token_id in step]
    return steps


def _within_limits(
    request: pb.GenerateRequest,
    step: Sequence[int],
    finished: pb.GenerationFinished,
    eos_token_ids: Sequence[int],
) -> list[int]:
    """Cuts a step at the output limit and at stop tokens; counts its tokens in `finished`."""
    stops = set(request.stop_params.stop_token_ids)
    if not request.stop_params.ignore_eos:
        stops.update(eos_token_ids)
    taken: list[int] = []
    for token_id in step[: _room(request, finished)]:
        taken.append(token_id)
        if token_id in stops:
            finished.finish_reason = pb.FINISH_REASON_STOP
            finished.stop_token_id = token_id
            break
    finished.output_token_count += len(taken)
    return taken


def _room(request: pb.GenerateRequest, finished: pb.GenerationFinished) -> int:
    return request.stop_params.max_output_token_count - finished.output_token_count


def _is_over(request: pb.GenerateRequest, finished: pb.GenerationFinished) -> bool:
    return finished.HasField("stop_token_id") or _room(request, finished) == 0


def _delta(
    request: pb.GenerateRequest, taken: Sequence[int], finished: pb.GenerationFinished
) -> pb.TokenDelta:
    """Returns the message of a step, counted as a verified round with two rejected draft tokens.

    A trace, if requested, has the tokens of the step as a chain after two wrong root children.
    """
    number = finished.speculation.round_count
    finished.speculation.round_count += 1
    num_accepted = max(len(taken) - 1, 0)
    num_drafted = 0
    if not request.speculation_params.disabled:
        num_drafted = num_accepted + 2
        stats = finished.speculation
        stats.verified_round_count += 1
        stats.accepted_token_count += num_accepted
        stats.drafted_token_count += num_drafted
        missing = num_accepted + 1 - len(stats.acceptance_histogram)
        stats.acceptance_histogram.extend([0] * max(missing, 0))
        stats.acceptance_histogram[num_accepted] += 1
    logprobs = []
    if request.HasField("top_logprob_count"):
        named = request.logprob_token_ids
        logprobs = [_logprobs(token, request.top_logprob_count, named) for token in taken]
    return pb.TokenDelta(
        token_ids=taken,
        accepted_token_count=num_accepted,
        drafted_token_count=num_drafted,
        logprobs=logprobs,
        trace=_trace(number, taken, num_drafted) if request.speculation_params.trace else None,
    )


def _trace(number: int, taken: Sequence[int], num_drafted: int) -> pb.RoundTrace:
    trace = pb.RoundTrace(round=number, row_count=1 + num_drafted)
    trace.verify_duration.FromMilliseconds(4)
    trace.wait_duration.FromMilliseconds(2)
    if num_drafted:
        trace.algorithm = "FAKE"
        trace.draft_duration.FromMilliseconds(1)
        path = taken[:-1]
        trace.tree.token_ids.extend([1, 2, *path])
        trace.tree.parent_indices.extend([-1, -1, *(i + 1 if i else -1 for i in range(len(path)))])
        trace.tree.log_probs.extend([-1.0] * num_drafted)
        trace.accepted_node_indices.extend(range(2, num_drafted))
    return trace


def _logprobs(token_id: int, num_top: int, named: Sequence[int]) -> pb.TokenLogprobs:
    """Returns log probabilities: the token itself is the most probable one, each successor is half
    as probable as the token before it, and the log probability of a named token is minus its id."""
    top_ids = range(token_id, token_id + num_top)
    return pb.TokenLogprobs(
        log_prob=-0.5,
        rank=1,
        top_token_ids=[*top_ids, *named],
        top_log_probs=[
            *(-0.5 - 0.75 * place for place in range(num_top)),
            *(-float(named_id) for named_id in named),
        ],
    )
