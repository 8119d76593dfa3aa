"""One `Session` stream: many requests of one client, each with an id of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.target.requests.event_stream import EventStream, KeyedEvent
from services.target.requests.request import Event, Failed, Finished
from services.target.requests.request_record import RequestRecord
from services.target.requests.request_service import RequestService
from shared.errors import DeadlineExceeded, InvalidArgument, OutriderError
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.telemetry.request_id import new_request_id


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


class OpenSession:
    """The requests of one session. On the event loop.

    Args:
        stream: of the events of all of them, keyed by the ids that the client chose.
    """

    def __init__(self, requests: RequestService, stream: EventStream) -> None:
        self._requests = requests
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
        record = self._requests.record(
            submit.request,
            submit.trace_request_id or new_request_id(),
            submit.traceparent or None,
        )
        self._open[key] = _OpenRequest(record, self._timer(submit))
        self._requests.open_requests.add()
        if not submit.request.HasField("grammar"):
            await self._submit(submit, record)
            return
        task = asyncio.create_task(self._submit(submit, record))
        self._compiling[key] = task
        task.add_done_callback(lambda _: self._compiling.pop(key, None))

    async def _submit(self, submit: pb.Submit, record: RequestRecord) -> None:
        try:
            _check_timeout(submit)
            self._stream.check_room()
            await self._requests.submit(submit.request, record, self._stream, submit.request_id)
        except OutriderError as error:
            self._stream.put(submit.request_id, Failed(error))

    def _cancel(self, key: int) -> None:
        compiling = self._compiling.pop(key, None)
        if compiling is not None:
            compiling.cancel()
        self._requests.cancel(self._stream, key)

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
        timeout_s = _timeout_s(submit)
        if timeout_s is None:
            return None
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
            self._requests.open_requests.remove()


def _timeout_s(submit: pb.Submit) -> float | None:
    if not submit.HasField("timeout_duration"):
        return None
    return submit.timeout_duration.ToNanoseconds() / 1e9


def _check_timeout(submit: pb.Submit) -> None:
    timeout_s = _timeout_s(submit)
    if timeout_s is not None and timeout_s <= 0.0:
        message = f"timeout_duration is {timeout_s:g} s; it must be above 0"
        raise InvalidArgument.of("TIMEOUT_OUT_OF_RANGE", "timeout_duration", message)
