"""The gateway's routes. A request comes from `http_server.py` and goes to `planner.py` →
`answer.py` → `pool.py` → `target_link.py`. Its tokens come back through `answer.py` and `choice.py`
into `event_stream.py` (streamed responses) or `bodies.py` (whole responses)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from gateway import bodies
from gateway.answer import Answer
from gateway.event_stream import ChatEncoder, CompletionEncoder, respond
from gateway.failures import FAILURES, NOTICE_HEADER, json_response, on_error
from gateway.http_server import FILES_PREFIX, Access, BodyLimit, JsonRoute, RequestId
from gateway.messages.routes import add_message_routes
from gateway.metrics import kv_usage_exposition
from gateway.native.generate import add_generate_routes
from gateway.native.rollout_routes import add_rollout_routes
from gateway.native.server_routes import (
    add_history_routes,
    add_server_routes,
    add_token_routes,
    target_statuses,
)
from gateway.openapi import ChatAnswer, CompletionAnswer, DocumentedApp
from gateway.responses.routes import add_response_routes, add_stored_routes, stored_chat
from gateway.schema import ChatCompletionRequest, CompletionRequest
from gateway.serving import Gateway
from gateway.workers import ForAllWorkers
from shared.errors import InvalidArgument
from shared.telemetry.tracing import REQUEST_ID_KEY

__all__ = ["Gateway", "create_app"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "cache-control": "no-cache",  # the browser asks again and gets 304 if nothing has changed
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def create_app(gateway: Gateway) -> FastAPI:
    """Returns the ASGI application."""
    # FastAPI's own documentation pages load their scripts from another host.
    app = DocumentedApp(title="Outrider", version=gateway.version, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    for error_class in (*FAILURES, Exception):
        app.add_exception_handler(error_class, on_error)
    _add_openai_routes(app, gateway)
    add_stored_routes(app, gateway.response_store)
    add_response_routes(app, gateway)
    add_message_routes(app, gateway)
    add_generate_routes(app, gateway)
    add_token_routes(app, gateway)
    add_server_routes(app, gateway)
    add_history_routes(app, gateway)
    add_rollout_routes(app, gateway)
    _add_operations_routes(app, gateway)
    _add_playground(app)
    # The middleware added last runs first.
    if gateway.place is not None:
        app.add_middleware(ForAllWorkers, place=gateway.place)
    app.add_middleware(BodyLimit, settings=gateway.settings)
    app.add_middleware(Access, quotas=gateway.quotas)
    if gateway.settings.cors_origin:
        # Runs before the key is checked: a browser's preflight request carries no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.settings.cors_origin,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("retry-after", REQUEST_ID_KEY, NOTICE_HEADER),
        )
    app.add_middleware(RequestId)
    return app


def _add_openai_routes(app: FastAPI, gateway: Gateway) -> None:
    tokenizer = gateway.text.tokenizer

    @app.post("/v1/chat/completions", tags=["openai"], responses={200: {"model": ChatAnswer}})
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        plan = await gateway.planner.chat(body, gateway.pool.model(body.model))
        keep = None
        if body.store:
            plan, keep = stored_chat(gateway.response_store, body, plan, tokenizer)
        answer = Answer(plan, gateway, "chat_completions")
        return await respond(answer, ChatEncoder(answer, tokenizer, keep), request.receive)

    @app.post("/v1/completions", tags=["openai"], responses={200: {"model": CompletionAnswer}})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        plan = await gateway.planner.completion(body, gateway.pool.model(body.model))
        answer = Answer(plan, gateway, "completions")
        return await respond(answer, CompletionEncoder(answer, tokenizer), request.receive)

    @app.post("/v1/embeddings", tags=["openai"])
    async def embeddings(request: Request) -> Response:
        body = await request.body()
        name = gateway.pool.model(_model_of(body)).name
        message = f"model {name!r} generates text; it serves no embeddings"
        raise InvalidArgument.of("EMBEDDINGS_NOT_SERVED", "model", message)

    @app.get("/v1/models", tags=["openai"])
    async def models() -> dict[str, Any]:
        created = int(gateway.start_time_s)
        served = gateway.pool.models()
        names = {name: name for name in served} | gateway.pool.aliases()
        data = [bodies.model(name, created, served[root]) for name, root in sorted(names.items())]
        return {"object": "list", "data": data}

    @app.get("/v1/models/{name:path}", tags=["openai"])
    async def model(name: str) -> dict[str, Any]:
        if not name:
            return await models()
        return bodies.model(name, int(gateway.start_time_s), gateway.pool.model(name))


def _add_operations_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health", tags=["operations"])
    @app.get("/ready", tags=["operations"])
    @app.get("/ping", tags=["operations"])
    @app.head("/health", include_in_schema=False)
    @app.head("/ready", include_in_schema=False)
    @app.head("/ping", include_in_schema=False)
    async def health() -> Response:
        status, detail = gateway.health()
        return json_response(detail, status)

    @app.get("/version", tags=["operations"])
    async def version() -> dict[str, str]:
        return {"version": gateway.version}

    @app.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        statuses = [status for status in await target_statuses(gateway) if status is not None]
        content = gateway.metrics.exposition() + kv_usage_exposition(gateway.pool, statuses)
        return Response(content, media_type="text/plain; version=1.0.0; charset=utf-8")


def _add_playground(app: FastAPI) -> None:
    """Adds the playground: one page at `/` and its files. They hold no secret, so they need no API
    key. There is no build step, and the page loads nothing from other hosts: it works without a
    network, and its content security policy allows this server only."""
    files = _PageFiles(directory=Path(__file__).parent / "playground" / "page")

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    async def file(request: Request) -> Response:
        return await files.get_response(request.path_params["name"], request.scope)

    app.add_route("/", page, methods=["GET"], include_in_schema=False)
    app.add_route(f"{FILES_PREFIX}{{name:path}}", file, methods=["GET"], include_in_schema=False)


class _PageFiles(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(_PAGE_HEADERS)
        return response


def _model_of(body: bytes) -> str | None:
    """Returns the `model` of a body that may be any bytes; None where there is none."""
    try:
        content = orjson.loads(body)
    except ValueError:
        return None
    name = content.get("model") if isinstance(content, dict) else None
    return name if isinstance(name, str) else None
