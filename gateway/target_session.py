"""The requests of one target, carried together by the one stream of `TargetService.Session`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from grpc import aio

from gateway.generation import Delta, Event, Failed, Generation, PromptScored, Started
from gateway.target_codec import cancel_message, event_from_message, submit_message
from shared.errors import InvalidArgument, OutriderError, QueueFull
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc

Receive = Callable[[Event], None]
SessionCall = aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]

_log = logging.getLogger(__name__)
_MAX_UNSENT_MESSAGES = 4096


@dataclass(frozen=True, slots=True)
class _Live:
    receive: Receive
    num_reserved_tokens: int


class SessionEnded(Exception):
    """The target closed the session without an error."""


class TargetSession:
    """Live requests by their id on the stream. Outlives the stream: the next one carries on.

    Attributes:
        num_reserved_tokens: most tokens the live requests can grow to.
        num_tokens: tokens received since the start.
    """

    def __init__(self) -> None:
        self.num_reserved_tokens = 0
        self.num_tokens = 0
        self._request_ids = itertools.count(1)
        self._live: dict[int, _Live] = {}
        self._unsent: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()

    @property
    def num_live(self) -> int:
        """Requests submitted and not ended."""
        return len(self._live)

    def submit(self, generation: Generation, receive: Receive) -> int:
        """Sends a generation; its events go to `receive`, the last one is Finished or Failed.

        Returns:
            The id to cancel it by.

        Raises:
            QueueFull: the target does not read what it is sent.
            InvalidArgument: the request does not fit the wire.
        """
        if self._unsent.qsize() >= _MAX_UNSENT_MESSAGES:
            raise QueueFull.of(self._unsent.qsize(), _MAX_UNSENT_MESSAGES)
        request_id = next(self._request_ids)
        message = _encoded(request_id, generation)  # before anything is counted
        live = _Live(receive, generation.num_reserved_tokens)
        self._live[request_id] = live
        self.num_reserved_tokens += live.num_reserved_tokens
        self._unsent.put_nowait(message)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Ends interest in a request; does nothing when it has ended."""
        if self._end(request_id) is not None:
            self._unsent.put_nowait(cancel_message(request_id))

    def fail(self, error: OutriderError) -> None:
        """Fails everything that is live; another target may do better."""
        lost, self._live, self.num_reserved_tokens = self._live, {}, 0
        for live in lost.values():
            try:
                live.receive(Failed(error, may_retry=True))
            except Exception:  # the others must hear of it all the same
                _log.exception("a request could not be told that its target was lost")

    def open(self, channel: aio.Channel) -> SessionCall:
        """Opens the stream; nothing moves unless `read` and `write` run."""
        self._unsent = asyncio.Queue()
        # The stubs of grpc do not know that a stream may be written to by hand.
        return pb_grpc.TargetServiceStub(channel).Session()  # type: ignore[call-arg]

    async def read(self, call: SessionCall) -> None:
        """Hands events on until the stream ends.

        Raises:
            SessionEnded, grpc.aio.AioRpcError: how it did.
        """
        async for response in call:
            for event in response.events:
                self._dispatch(event)
        raise SessionEnded

    async def write(self, call: SessionCall) -> None:
        """Sends what is submitted and cancelled; ends by being cancelled only."""
        with contextlib.suppress(asyncio.InvalidStateError):
            while True:
                await call.write(await self._unsent.get())
        await asyncio.Event().wait()  # the call is over, and the reader tells why

    def _dispatch(self, message: pb.SessionEvent) -> None:
        live = self._live.get(message.request_id)
        if live is None:  # cancelled while the event travelled
            return
        event = event_from_message(message)
        if event is None:
            return
        if isinstance(event, Delta):
            self.num_tokens += len(event.token_ids)
        elif not isinstance(event, Started | PromptScored):
            self._end(message.request_id)
        live.receive(event)

    def _end(self, request_id: int) -> _Live | None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self.num_reserved_tokens -= live.num_reserved_tokens
        return live


def _encoded(request_id: int, generation: Generation) -> pb.SessionRequest:
    """Raises:
    InvalidArgument: a value that no check has named is too large, or no Unicode.
    """
    try:
        return submit_message(request_id, generation)
    except (ValueError, TypeError, OverflowError) as error:
        message = f"the request cannot be sent to a target: {error}"
        raise InvalidArgument(message, reason="REQUEST_UNENCODABLE") from error
