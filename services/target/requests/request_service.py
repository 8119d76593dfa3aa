"""Requests on their way to the engine, whichever call brought them."""

from __future__ import annotations

from services.target.requests.admission import Admission
from services.target.requests.event_stream import EventStream
from services.target.requests.generation_messages import generation_request
from services.target.requests.request_record import RequestRecord
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.rpc.grammar import grammar_from_message


class RequestService:
    """Takes requests for one engine. On the event loop.

    Attributes:
        open_requests: how many callers wait for an end.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._engine = admission.engine
        self._recorder = admission.recorder
        self.open_requests = admission.open_requests

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
        self._admission.check_open()
        limits = self._engine.limits
        request = generation_request(message, record, limits, self._recorder.clock())
        grammar = grammar_from_message(message.grammar) if message.HasField("grammar") else None
        request = await self._admission.with_grammar(request, grammar)
        self._engine.submit(request, stream, key)

    def cancel(self, stream: EventStream, key: int) -> None:
        """Aborts a request; an unknown one is ignored."""
        self._engine.cancel(stream, key)
