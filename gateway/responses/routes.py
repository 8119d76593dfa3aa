"""`/v1/responses`, OpenAI's newer interface."""

from __future__ import annotations

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.event_stream import EventStream, whole_answer
from gateway.responses.answer import ResponseChunks, ResponseText
from gateway.responses.chat import response_plan
from gateway.responses.schema import ResponsesRequest
from gateway.serving import Gateway
from shared.errors import NotFound
from shared.telemetry.request_id import current_request_id


def add_response_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes."""
    tokenizer = gateway.text.tokenizer

    @app.post("/v1/responses", tags=["openai"])
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        name, model = gateway.pool.model(body.model)
        trace_id = current_request_id.get()
        asked = await response_plan(body, gateway.planner, name, model, trace_id)
        answer = gateway.answer(asked.plan, "responses")
        if asked.plan.is_stream:
            return EventStream(answer, ResponseChunks(asked, tokenizer))
        (finale,) = await whole_answer(answer, request.receive)
        text = ResponseText(asked, tokenizer)
        text.add(finale.piece)
        text.close(finale.choice)
        # As it is: it repeats what was asked, which the package's type may not allow for.
        content = orjson.dumps(text.response(finale.choice))
        return Response(content, media_type="application/json")

    @app.get("/v1/responses/{path:path}", tags=["openai"])
    @app.delete("/v1/responses/{path:path}", tags=["openai"])
    @app.post("/v1/responses/{path:path}", tags=["openai"])
    async def stored(path: str) -> Response:
        message = f"responses are not stored here, so there is no {path[:128]!r}"
        raise NotFound(message, reason="RESPONSE_NOT_STORED")
