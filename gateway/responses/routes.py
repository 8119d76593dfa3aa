"""Routes of `/v1/responses`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from gateway.answer import Answer
from gateway.api_keys import owner_of_request
from gateway.event_stream import EventStream, whole_answer
from gateway.responses.answer import ResponseChunks, ResponseText
from gateway.responses.background import BackgroundResponses
from gateway.responses.chat import (
    REQUEST,
    History,
    ResponsePlan,
    compacted,
    history_of,
    keep,
    response_plan,
)
from gateway.responses.kept_routes import Limit
from gateway.responses.schema import InputItem, ResponseAnswer, ResponsesRequest
from gateway.responses.store import RESPONSE, Order, ResponseStore, StoredResponse, item_list
from gateway.serving import Gateway
from shared.errors import InvalidArgument, NotFound

_POLL_S = 0.25


def add_response_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes; those of kept responses where there is a store."""
    store = gateway.response_store
    background = None
    if store is not None:
        background = BackgroundResponses(store, gateway.text.tokenizer)
    _add_generation(app, gateway, store, background)
    _add_counting(app, gateway)
    if store is not None and background is not None:
        _add_kept(app, store, background)

    @app.get("/v1/responses/{path:path}", tags=["openai"])
    @app.delete("/v1/responses/{path:path}", tags=["openai"])
    @app.post("/v1/responses/{path:path}", tags=["openai"])
    async def not_here(path: str) -> Response:
        why = "; nothing is kept without --response-store" if store is None else ""
        message = f"there is no response {path[:128]!r} here{why}"
        raise NotFound(message, reason="RESPONSE_NOT_STORED")


async def _planned(
    gateway: Gateway, body: ResponsesRequest, history: History | None = None
) -> ResponsePlan:
    model = gateway.pool.model(body.model)
    if history is None:
        history = await history_of(body, gateway.response_store, owner_of_request())
    return await response_plan(body, history, gateway.planner, model)


def _add_generation(
    app: FastAPI,
    gateway: Gateway,
    store: ResponseStore | None,
    background: BackgroundResponses | None,
) -> None:
    tokenizer = gateway.text.tokenizer

    @app.post("/v1/responses", tags=["openai"], responses={200: {"model": ResponseAnswer}})
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        asked = await _planned(gateway, body)
        answer = Answer(asked.plan, gateway, "responses")
        owner = owner_of_request()

        def ended(response: dict[str, Any]) -> None:
            if store is not None:
                keep(store, owner, asked, StoredResponse(response, asked.history.own))

        if body.background and background is not None:
            started = await background.start(owner, asked, answer)
            return _events(started.follow()) if body.stream else _json(started.body)
        if asked.plan.is_stream:
            return EventStream(answer, ResponseChunks(asked, tokenizer, ended))
        (final_choice,) = await whole_answer(answer, request.receive)
        text = ResponseText(asked, tokenizer)
        text.add(final_choice.piece)
        text.close(final_choice.choice)
        response = text.response(final_choice.choice)
        ended(response)
        return _json(response)


def _add_counting(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/responses/input_tokens", tags=["openai"])
    async def input_tokens(body: ResponsesRequest) -> dict[str, str | int]:
        asked = await _planned(gateway, body.model_copy(update={"store": None}))
        return {"object": "response.input_tokens", "input_tokens": asked.plan.num_prompt_tokens}

    @app.post("/v1/responses/compact", tags=["openai"])
    async def compact(body: ResponsesRequest, request: Request) -> Response:
        history = await history_of(body, gateway.response_store, owner_of_request())
        request_item = InputItem(type="message", role="user", content=REQUEST)
        whole = History([*history.items, ("input", request_item)], (), False)
        plain = body.model_copy(update={"tools": None, "tool_choice": None, "text": None})
        asked = await _planned(gateway, plain, whole)
        (final_choice,) = await whole_answer(
            Answer(asked.plan, gateway, "responses"), request.receive
        )
        text = ResponseText(asked, gateway.text.tokenizer)
        text.add(final_choice.piece)
        text.close(final_choice.choice)
        answered = {
            "id": asked.plan.request_id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": compacted([item for _, item in history.items], text.said),
            "usage": text.response(final_choice.choice)["usage"],
        }
        return _json(answered)


def _add_kept(app: FastAPI, store: ResponseStore, background: BackgroundResponses) -> None:
    @app.get("/v1/responses/{response_id}", tags=["openai"])
    async def retrieve(
        response_id: str, stream: bool = False, starting_after: int = -1
    ) -> Response:
        owner = owner_of_request()
        running = background.find(owner, response_id)
        if not stream:
            return _json((await store.response(owner, response_id)).body)
        if running is not None and running.asked.plan.is_stream:
            return _events(running.follow(starting_after))
        kept = await _ended(store, owner, response_id)
        if kept.events is None:
            message = "stream is true; the response was not made with stream and background"
            raise InvalidArgument.of("STREAM_NOT_KEPT", "stream", message)
        content = b"".join(kept.events[max(starting_after + 1, 0) :])
        return Response(content, media_type="text/event-stream")

    @app.delete("/v1/responses/{response_id}", tags=["openai"])
    async def delete(response_id: str) -> dict[str, Any]:
        owner = owner_of_request()
        await store.response(owner, response_id)
        background.forget(owner, response_id)  # first: it must not be kept again
        await store.delete(owner, response_id, RESPONSE)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post("/v1/responses/{response_id}/cancel", tags=["openai"])
    async def cancel(response_id: str) -> Response:
        owner = owner_of_request()
        await background.cancel(owner, response_id)
        body = (await store.response(owner, response_id)).body
        if not body["background"]:
            message = "Cannot cancel a synchronous response."  # OpenAI's words
            raise InvalidArgument.of("NOT_IN_BACKGROUND", "response_id", message)
        return _json(body)

    @app.get("/v1/responses/{response_id}/input_items", tags=["openai"])
    async def input_items(
        response_id: str,
        after: str | None = None,
        limit: Limit = 20,
        order: Order = "desc",
    ) -> dict[str, Any]:
        kept = await store.response(owner_of_request(), response_id)
        return item_list(kept.input, after, limit, order)


async def _ended(store: ResponseStore, owner: str, response_id: str) -> StoredResponse:
    """Returns a response; one with events when it has ended. Where it runs in another worker, its
    events are there then, and not before.

    Raises:
        NotFound: there is none.
    """
    while True:
        kept = await store.response(owner, response_id)
        if kept.events is None or not kept.is_running:
            return kept
        await asyncio.sleep(_POLL_S)


def _json(body: dict[str, Any]) -> Response:
    # As it is: it repeats what was asked, which the package's type may not allow for.
    return Response(orjson.dumps(body), media_type="application/json")


def _events(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")
