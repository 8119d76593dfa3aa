"""Requests on their way to the engine, whichever call brought them."""

from __future__ import annotations

import dataclasses

from services.target.engine import Engine
from services.target.event_stream import EventStream
from services.target.generation_messages import generation_request
from services.target.grammars.compiler import GrammarCompiler
from services.target.open_requests import OpenRequests
from services.target.request_record import RequestRecord, RequestRecorder
from shared.errors import Unavailable
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.rpc.grammar import grammar_from_message
from shared.rpc.lifecycle import Lifecycle, State


class RequestService:
    """Takes requests for one engine. On the event loop.

    Attributes:
        open_requests: how many callers wait for an end.
    """

    def __init__(
        self,
        engine: Engine,
        grammars: GrammarCompiler,
        lifecycle: Lifecycle,
        recorder: RequestRecorder,
    ) -> None:
        self._engine = engine
        self._grammars = grammars
        self._lifecycle = lifecycle
        self._recorder = recorder
        self.open_requests = OpenRequests()

    def record(
        self, message: pb.GenerateRequest, request_id: str, traceparent: str | None
    ) -> RequestRecord:
        """Begins the record of a request."""
        return self._recorder.begin(request_id, len(message.prompt_token_ids), traceparent)

    async def submit(
        self, message: pb.GenerateRequest, record: RequestRecord, stream: EventStream, key: int
    ) -> None:
        """Starts a request, whose events go to `stream` under `key`; waits only for its grammar,
        if it has one.

        Raises:
            OutriderError: the request is refused.
        """
        if self._lifecycle.state is State.DRAINING:
            raise Unavailable.draining()
        limits = self._engine.limits
        request = generation_request(message, record, limits, self._recorder.clock())
        if message.HasField("grammar"):
            grammar = await self._grammars.compile(grammar_from_message(message.grammar))
            request = dataclasses.replace(request, grammar=grammar)
        self._engine.submit(request, stream, key)

    def cancel(self, stream: EventStream, key: int) -> None:
        """Aborts a request; an unknown one is ignored."""
        self._engine.cancel(stream, key)
