"""Pure ASGI middleware, because Starlette's function style costs a task switch for every chunk. All
scopes are HTTP scopes: the server has no others."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api_keys import LimitExceeded, Quotas, current_quota
from gateway.failures import Problem, error_response
from gateway.notices import NOTICE_HEADER, current_notices, header_value
from gateway.playground.routes import FILES_PREFIX
from gateway.settings import GatewaySettings
from shared.telemetry.tracing import (
    REQUEST_ID_KEY,
    TRACEPARENT_KEY,
    current_request_id,
    current_traceparent,
    new_request_id,
)

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
        if path in _OPEN_PATHS or path.startswith(FILES_PREFIX):
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
