"""The stream to one target: dials, attaches, submits the target's events to the engine, sends its
candidates, and dials again after a delay."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from grpc import aio

from services.draft.engine import Deliver
from services.draft.events import (
    Event,
    LinkStatus,
    LinkTerms,
    Output,
    WeightsUpdated,
    WorkerIdentity,
)
from services.draft.link_codec import (
    attach_request,
    event_from_response,
    open_ring,
    request_from_output,
    ring_taken_request,
    terms_from_message,
    weights_updated_request,
)
from shared.errors import FailedPrecondition, InvalidArgument, OutriderError, QueueFull, Unavailable
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.speculation.v1 import speculation_service_pb2_grpc as pb_grpc
from shared.rpc.channel import open_channel
from shared.rpc.status import error_from_rpc
from shared.telemetry.wire_meter import WireMeter
from shared.tls import ClientTls

if TYPE_CHECKING:
    from shared.runtime.ring_memory import FeatureRingReader


# The delay before the next dial.

_MAX_DOUBLINGS = 32


@dataclass(slots=True)
class Backoff:
    """Doubling delays, with jitter so that drafts do not dial in lockstep."""

    first_s: float = 0.1
    longest_s: float = 5.0
    generator: random.Random = field(default_factory=random.Random)
    _num_failures: int = 0

    def reset(self) -> None:
        """Call after an attempt that succeeded."""
        self._num_failures = 0

    def next_s(self) -> float:
        """Returns between half and all of `first_s * 2^failures`, at most `longest_s`."""
        delay_s = min(self.first_s * 2.0**self._num_failures, self.longest_s)
        self._num_failures = min(self._num_failures + 1, _MAX_DOUBLINGS)
        return delay_s * self.generator.uniform(0.5, 1.0)

    def slow_s(self) -> float:
        """Returns the delay after a refusal that only an operator can fix."""
        return self.longest_s * self.generator.uniform(0.5, 1.0)


MAX_WAITING_REQUESTS = 64
ATTACH_TIMEOUT_S = 10.0
DETACH_TIMEOUT_S = 1.0

Requests = asyncio.Queue[pb.SpeculateRequest | None]
"""Requests to send; None ends the stream."""
ReloadTables = Callable[[aio.Channel, int], Coroutine[Any, Any, None]]
"""Takes the channel to the target and the number of the target's weight updates."""
Stream = aio.StreamStreamCall[pb.SpeculateRequest, pb.SpeculateResponse]
log = logging.getLogger(__name__)


class LinkedEngine(Protocol):
    """The engine behind a link; see `DraftEngine`."""

    def open_link(self, terms: LinkTerms, deliver: Deliver) -> int: ...
    def close_link(self, link: int) -> None: ...
    def submit(self, event: Event) -> None: ...


class AttachClient:
    """Holds one `Speculate` stream to one target for as long as `run` runs."""

    def __init__(
        self,
        address: str,
        identity: WorkerIdentity,
        engine: LinkedEngine,
        backoff: Backoff,
        *,
        max_waiting_requests: int = MAX_WAITING_REQUESTS,
        tls: ClientTls | None = None,
        wire: WireMeter | None = None,
        reload_tables: ReloadTables | None = None,
    ) -> None:
        """Args:
        reload_tables: reads the tensors borrowed from the target again after a weight update.
        """
        self.status = LinkStatus(address)
        self._identity = identity
        self._engine = engine
        self._backoff = backoff
        self._max_waiting_requests = max_waiting_requests
        self._tls = tls
        self._wire = wire or WireMeter()
        self._meter = self._wire.stream("")
        self._detaching = asyncio.Event()
        self._reload_tables = reload_tables
        self._reload_task: asyncio.Task[None] | None = None
        self._requests: Requests | None = None

    def weights_updated(self, version: str) -> None:
        """Tells the target, if one is attached, that the draft has new weights."""
        if self._requests is not None:
            self._requests.put_nowait(weights_updated_request(version))

    def detach(self) -> None:
        """Makes `run` end; the target sees a regular end of the stream."""
        self._detaching.set()

    async def run(self) -> None:
        """Attaches, and attaches again whenever the stream ends, until `detach`."""
        while not self._detaching.is_set():
            delay_s = await self._serve_one_stream()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._detaching.wait(), delay_s)
        self.status = LinkStatus(self.status.address)

    async def _serve_one_stream(self) -> float:
        """Returns the seconds to wait before the next stream."""
        try:
            async with open_channel(self.status.address, self._tls) as channel:
                await self._serve_channel(channel)
            ended = Unavailable("the target ended the stream", reason="STREAM_ENDED")
            return self._record_end(ended)
        except aio.AioRpcError as failure:
            return self._record_end(error_from_rpc(failure))
        except OutriderError as refusal:
            return self._record_end(refusal)

    def _record_end(self, error: OutriderError) -> float:
        """Records why the stream ended; returns the delay before the next stream."""
        if self._detaching.is_set():
            log.info("target %s: detached", self.status.address)
            return 0.0
        is_refused = isinstance(error, FailedPrecondition | InvalidArgument)
        message = f"{error.reason}: {error.message}"
        self.status = LinkStatus(self.status.address, None, message, is_refused)
        if is_refused:
            log.error("target %s refused: %s", self.status.address, self.status.last_error)
            return self._backoff.slow_s()
        log.warning("target %s: %s", self.status.address, self.status.last_error)
        return self._backoff.next_s()

    async def _serve_channel(self, channel: aio.Channel) -> None:
        """Serves a stream until either side ends it."""
        stream = _open_stream(channel)
        attached = await self._attach(stream)
        terms = terms_from_message(attached, self._identity.feature_spec)
        requests: Requests = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def enqueue(output: Output) -> None:
            # A full queue ends the stream: the target reads more slowly than it asks for trees.
            is_full = requests.qsize() >= self._max_waiting_requests
            requests.put_nowait(None if is_full else request_from_output(output))

        self._meter = self._wire.stream(attached.attachment_id)
        link = self._engine.open_link(terms, lambda out: _call_soon(loop, enqueue, out))
        self.status = LinkStatus(self.status.address, attached.attachment_id)
        self._backoff.reset()
        log.info("target %s: attached as %s", self.status.address, attached.attachment_id)
        ring = open_ring(attached, self._identity)
        self._requests = requests
        try:
            await self._transfer(stream, link, requests, ring, channel)
        finally:
            self._requests = None
            self._engine.close_link(link)
            self._cancel_reload()

    async def _attach(self, stream: Stream) -> pb.Attached:
        """Raises:
        AioRpcError: the target refused or cannot be reached.
        Unavailable: the target does not answer.
        """
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                # Writing to an ended stream is ignored: reading it raises the reason.
                with contextlib.suppress(asyncio.InvalidStateError):
                    await stream.write(attach_request(self._identity))
                response = await _read(stream)
        except TimeoutError as error:
            message = f"no answer to attach within {ATTACH_TIMEOUT_S:g} s"
            raise Unavailable(message, reason="ATTACH_TIMEOUT") from error
        if response is None or response.WhichOneof("message") != "attached":
            message = "the stream ended" if response is None else "another message came"
            raise Unavailable(f"{message} before `attached`", reason="ATTACH_UNANSWERED")
        return response.attached

    async def _transfer(
        self,
        stream: Stream,
        link: int,
        requests: Requests,
        ring: FeatureRingReader | None,
        channel: aio.Channel,
    ) -> None:
        """Reads and writes until the stream breaks, the target drains, or `detach` was called."""
        draining = asyncio.Event()
        reader = self._read_all(stream, link, draining, requests, ring, channel)
        reading = asyncio.create_task(reader)
        writing = asyncio.create_task(self._write_all(stream, requests))
        leaving = [asyncio.create_task(event.wait()) for event in (draining, self._detaching)]
        tasks: list[asyncio.Task[Any]] = [reading, writing, *leaving]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._engine.close_link(link)
            if writing.done():
                await writing
            elif not reading.done():
                await _half_close(stream, reading)
            # The reader raises the status of a stream that has ended, whichever task noticed first.
            if reading.done() or writing.done():
                await reading
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_all(
        self,
        stream: Stream,
        link: int,
        draining: asyncio.Event,
        requests: Requests,
        ring: FeatureRingReader | None,
        channel: aio.Channel,
    ) -> None:
        """Submits every event until the target ends the stream."""
        _free_ring(ring, requests)
        while (response := await _read(stream)) is not None:
            self._meter.received(response.ByteSize(), response.WhichOneof("message") or "")
            if response.WhichOneof("message") == "drain":
                grace_s = response.drain.grace_duration.ToMilliseconds() / 1e3
                log.info("target %s drains within %.1f s", self.status.address, grace_s)
                draining.set()
            elif not draining.is_set():
                event = event_from_response(link, response, self._identity.feature_spec, ring)
                if event is not None:
                    self._engine.submit(event)
                if isinstance(event, WeightsUpdated) and self._reload_tables is not None:
                    self._cancel_reload()  # an older update is of no use
                    reloading = self._reload_tables(channel, event.num_updates)
                    self._reload_task = asyncio.create_task(reloading)
                _free_ring(ring, requests)

    def _cancel_reload(self) -> None:
        if self._reload_task is not None:
            self._reload_task.cancel()
            self._reload_task = None

    async def _write_all(self, stream: Stream, requests: Requests) -> None:
        """Returns when the stream is broken.

        Raises:
            QueueFull: the target reads too slowly.
        """
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            while (request := await requests.get()) is not None:
                self._meter.sent(request.ByteSize(), request.WhichOneof("message") or "")
                await stream.write(request)
            raise QueueFull.of(self._max_waiting_requests, self._max_waiting_requests)


def _free_ring(ring: FeatureRingReader | None, requests: Requests) -> None:
    """Tells the target which rows of the ring are copied, when that is due."""
    end = None if ring is None else ring.freed()
    if end is not None:
        requests.put_nowait(ring_taken_request(end))


def _open_stream(channel: aio.Channel) -> Stream:
    # Called without an iterator of requests, the stream is written to message by message; the type
    # stubs of grpcio lack that form.
    open_stream: Any = pb_grpc.SpeculationServiceStub(channel).Speculate
    stream: Stream = open_stream()
    return stream


async def _read(stream: Stream) -> pb.SpeculateResponse | None:
    """Returns the next message; None when the target has ended the stream without an error."""
    response: Any = await stream.read()
    return response or None  # EOF is falsy, a message never is


async def _half_close(stream: Stream, reading: asyncio.Task[None]) -> None:
    """Ends the sending side and lets the target end the stream."""
    with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
        await stream.done_writing()
    await asyncio.wait([reading], timeout=DETACH_TIMEOUT_S)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Any, output: Output) -> None:
    # The loop is closed only when the process ends; then nobody waits for the output.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, output)
