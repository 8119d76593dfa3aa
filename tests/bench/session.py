"""The requests of a benchmark, carried together by one stream, as those of a gateway are: a step of
the target then is one message, however many sequences it served."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpc import aio

from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc

OnTokens = Callable[[int], None]


class RequestFailed(Exception):
    """The target refused or gave up a request; the message is its own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        num_rounds: the target's steps for it.
        arrivals: when tokens came, and how many.
    """

    token_ids: tuple[int, ...]
    num_rounds: int
    arrivals: tuple[tuple[float, int], ...] = ()


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    end: asyncio.Future[Answer]
    on_tokens: OnTokens | None
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def take_tokens(self, tokens: Sequence[int]) -> None:
        self.token_ids += tokens
        self.arrivals.append((time.perf_counter(), len(tokens)))
        if self.on_tokens is not None:
            self.on_tokens(len(tokens))

    def take(self, response: pb.GenerateResponse) -> None:
        if response.delta.token_ids:
            self.take_tokens(response.delta.token_ids)
        if response.HasField("finished") and not self.end.done():
            num_rounds = response.finished.speculation.round_count
            self.end.set_result(Answer(tuple(self.token_ids), num_rounds, tuple(self.arrivals)))

    def fail(self, message: str) -> None:
        if not self.end.done():
            self.end.set_exception(RequestFailed(message))


class Session:
    """A `Session` stream to a target that serves."""

    def __init__(self, channel: aio.Channel) -> None:
        # The stubs of grpc do not know that a stream may be written to by hand.
        self._call: aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse] = (
            pb_grpc.TargetServiceStub(channel).Session()  # type: ignore[call-arg]
        )
        self._ids = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._writing = asyncio.Lock()
        self._reading = asyncio.create_task(self._read())

    async def answer(self, request: pb.GenerateRequest, on_tokens: OnTokens | None) -> Answer:
        """Returns the answer; `on_tokens` hears how many come each time.

        Raises:
            RequestFailed: see there.
        """
        key = next(self._ids)
        self._open[key] = _Open(asyncio.get_running_loop().create_future(), on_tokens)
        try:
            submit = pb.Submit(request_id=key, request=request)
            async with self._writing:
                await self._call.write(pb.SessionRequest(submit=submit))
            return await self._open[key].end
        except asyncio.InvalidStateError:
            raise RequestFailed("the target has ended the session") from None
        finally:
            del self._open[key]

    async def close(self) -> None:
        """Ends the stream and what is open on it."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._call.cancel()

    async def _read(self) -> None:
        try:
            async for response in self._call:
                deltas, start = response.deltas, 0
                for key, count in zip(deltas.request_ids, deltas.token_counts, strict=True):
                    if key in self._open:
                        self._open[key].take_tokens(deltas.token_ids[start : start + count])
                    start += count
                for event in response.events:
                    self._take(event)
            self._fail_all("the target has ended the session")
        except aio.AioRpcError as error:
            self._fail_all(str(error.details()))

    def _take(self, event: pb.SessionEvent) -> None:
        request = self._open.get(event.request_id)
        if request is None:
            return
        if event.HasField("failure"):
            request.fail(event.failure.message)
        else:
            request.take(event.response)

    def _fail_all(self, message: str) -> None:
        for request in self._open.values():
            request.fail(message)
