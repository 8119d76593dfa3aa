"""The gateway's routes. A request goes from here to `planner.py` → `answer.py` → `pool.py` →
`target_link.py`. Its tokens come back through `answer.py` and `choice.py` into `event_stream.py`
(streamed responses) or `bodies.py` (whole responses)."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import bodies
from gateway.answer import Answer
from gateway.api_keys import LimitExceeded, Quotas, current_quota
from gateway.event_stream import ChatEncoder, CompletionEncoder, respond
from gateway.failures import (
    FAILURES,
    NOTICE_HEADER,
    Problem,
    current_notices,
    error_response,
    header_value,
    json_response,
    on_error,
)
from gateway.json_body import JsonRoute
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
from gateway.settings import GatewaySettings
from gateway.workers import ForAllWorkers
from shared.errors import InvalidArgument
from shared.telemetry.tracing import (
    REQUEST_ID_KEY,
    TRACEPARENT_KEY,
    current_request_id,
    current_traceparent,
    new_request_id,
)

__all__ = ["Gateway", "create_app"]

_FILES_PREFIX = "/playground/"
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
        return bodies.model(name, int(gateway.start_time_s), gateway.pool.model(name))


def _add_operations_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health", tags=["operations"])
    @app.get("/ready", tags=["operations"])
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
    app.add_route(f"{_FILES_PREFIX}{{name:path}}", file, methods=["GET"], include_in_schema=False)


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


# Pure ASGI middleware, because Starlette's function style costs a task switch for every chunk. All
# scopes are HTTP scopes: the server has no others.

_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
_TOO_SLOW = HTTPStatus.REQUEST_TIMEOUT
_BUSY = HTTPStatus.SERVICE_UNAVAILABLE
_OPEN_PATHS = frozenset(
    {"/", "/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"}
)
_FREE_PATHS = frozenset({"/abort_request"})  # a client at its limit must be able to abort requests
_SAFE_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class RequestId:
    """Takes the client's `x-request-id` if it is well-formed, else makes one; sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_KEY, "")
        request_id = given if _SAFE_REQUEST_ID.fullmatch(given) else new_request_id()
        current_request_id.set(request_id)
        current_traceparent.set(headers.get(TRACEPARENT_KEY))
        notices: list[str] = []
        current_notices.set(notices)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": list(message.get("headers", ()))}
                MutableHeaders(scope=message)[REQUEST_ID_KEY] = request_id
                if notices:
                    MutableHeaders(scope=message)[NOTICE_HEADER] = header_value(notices)
            await send(message)

        await self._app(scope, receive, send_with_id)


class Access:
    """Admits requests with an API key, within the key's limits.

    Probes, metrics, documentation and the playground's page need no key. OpenAI's clients send the
    key as `Authorization: Bearer KEY`, Anthropic's as `x-api-key: KEY`. Only POST requests count
    against the limits: others cost nearly nothing.
    """

    def __init__(self, app: ASGIApp, quotas: Quotas) -> None:
        self._app = app
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in _OPEN_PATHS or path.startswith(_FILES_PREFIX):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        quota = self._quotas.of(
            token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        )
        if quota is None:
            message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
            problem = Problem(HTTPStatus.UNAUTHORIZED, message, "invalid_api_key")
            await problem.response(path)(scope, receive, send)
            return
        current_quota.set(quota)
        if scope["method"] != "POST" or path in _FREE_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            quota.admit()
        except LimitExceeded as error:
            await error_response(error, path)(scope, receive, send)
            return
        with quota.place():
            await self._app(scope, receive, send)


class BodyLimit:
    """Refuses a body that is too large, with or without a content length, or does not arrive in
    time. Also refuses bodies while all arriving bodies together take too much memory."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._settings = settings
        self._num_buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            problem = Problem(_TOO_LARGE, self._message(int(length)), "body_too_large")
            await problem.response(scope["path"])(scope, receive, send)
            return
        num_bytes, is_complete = 0, False
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._settings.body_timeout_s

        async def receive_counted() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # the application waits for the client's disconnect
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline_s - loop.time())
            except TimeoutError as error:
                limit = f"the body did not arrive within {self._settings.body_timeout_s:g} s"
                raise HTTPException(_TOO_SLOW, limit, {"connection": "close"}) from error
            num_new = len(message.get("body", b""))
            num_bytes += num_new
            self._num_buffered += num_new
            if num_bytes > self._settings.max_body_bytes:
                # FastAPI passes on only this kind of exception while it reads a body.
                raise HTTPException(_TOO_LARGE, self._message(num_bytes))
            if not message.get("more_body", False):
                is_complete = True
                self._num_buffered -= num_bytes
            elif self._num_buffered > self._settings.max_buffered_bytes:
                limit = f"{self._settings.max_buffered_bytes:,} bytes of bodies are arriving"
                raise HTTPException(_BUSY, limit, {"retry-after": "1"})
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            if not is_complete:
                self._num_buffered -= num_bytes

    def _message(self, num_bytes: int) -> str:
        """Args:
        num_bytes: the body's content length, or the bytes that have arrived so far.
        """
        limit = self._settings.max_body_bytes
        return f"the body has {num_bytes:,} bytes or more; it may have {limit:,}"
