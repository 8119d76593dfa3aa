"""From a connection to the routes: uvicorn with the gateway's own signal handling and drain; limits
on connections, headers and bodies; request ids and API keys; JSON that can be encoded again.

Python's own parser accepts lone surrogates, `NaN`, and integers and nesting of any size. Neither
UTF-8, nor protobuf, nor other JSON writers can encode those."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.api_keys import LimitExceeded, Quotas, current_quota
from gateway.failures import (
    NOTICE_HEADER,
    Problem,
    current_notices,
    error_response,
    header_value,
)
from gateway.settings import GatewaySettings
from shared.errors import InvalidArgument, SettingsError
from shared.telemetry.tracing import (
    REQUEST_ID_KEY,
    TRACEPARENT_KEY,
    current_request_id,
    current_traceparent,
    new_request_id,
)

BODY_WRITER = "outrider.body_writer"  # key of the `BodyWriter` in an ASGI scope's extensions
_TOO_MANY_CONNECTIONS = b"503 Service Unavailable"
_HEADERS_TOO_SLOW = b"408 Request Timeout"
_HEADERS_TOO_LARGE = b"431 Request Header Fields Too Large"
_BACKLOG = 2048
_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
_TOO_SLOW = HTTPStatus.REQUEST_TIMEOUT
_BUSY = HTTPStatus.SERVICE_UNAVAILABLE
FILES_PREFIX = "/playground/"
_OPEN_PATHS = frozenset(
    {"/", "/health", "/ready", "/ping", "/metrics", "/version", "/docs", "/openapi.json"}
)
_READING = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_GENERATING_GET = "/health_generate"
# A client at its limit must be able to end requests.
_FREE_PATHS = re.compile(r"/abort_request|/v1/responses/[^/]+/cancel")
_SAFE_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
MAX_DEPTH = 128
_OPENING = (b"{", b"[")
_MAX_SHOWN_PATH = 200  # characters of a field's path in a message


class BodyWriter:
    """Writes chunks of a response that has begun and has no content length, without a coroutine."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def is_ready(self) -> bool:
        """Returns whether ASGI's `send` would return without waiting."""
        return not (self._flow.write_paused or self._cycle.disconnected)

    def write(self, chunk: bytes) -> None:
        """Writes one chunk, which must not be empty."""
        self._write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection that exceeds a limit, with an HTTP status where one can still be sent."""

    def __init__(self, settings: GatewaySettings, **options: Any) -> None:
        super().__init__(**options)
        self._settings = settings
        self._num_header_bytes = 0
        self._is_in_headers = False
        self._is_refused = False
        self._deadline: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()
        if len(self.connections) > self._settings.max_connections:
            self._refuse(_TOO_MANY_CONNECTIONS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        # Headers that arrive together with the body are counted by `on_headers_complete`.
        if self._is_in_headers and self._num_header_bytes > self._settings.max_header_bytes:
            self._refuse(_HEADERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._expect_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._deadline.cancel()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self._settings.max_header_bytes:
            self._refuse(_HEADERS_TOO_LARGE)
            return
        super().on_headers_complete()
        if self.cycle is not None:
            writer: Any = BodyWriter(self.cycle)
            self.scope["extensions"] = {BODY_WRITER: writer}

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()

    def _expect_headers(self) -> None:
        if self._is_in_headers:  # first request: `connection_made` has set the deadline
            return
        self._is_in_headers = True
        self._num_header_bytes = 0
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(
            self._settings.header_timeout_s, self._refuse, _HEADERS_TOO_SLOW
        )

    def _refuse(self, status: bytes) -> None:
        """Sends a status and closes the connection; during another response it only closes."""
        self._deadline.cancel()
        self._is_refused = True
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            head = b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head)
        self.transport.close()


class _Server(uvicorn.Server):
    """Installs no signal handlers: the gateway drains before uvicorn's own shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an ASGI application on a TCP socket, or on a Unix socket at a path without TLS."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket | Path, settings: GatewaySettings
    ) -> None:
        self._listener = listener
        is_path = isinstance(listener, Path)
        tls = None if is_path else settings.http_tls
        config = uvicorn.Config(
            app,
            uds=str(listener) if is_path else None,
            http=partial(BoundedProtocol, settings),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            ssl_context_factory=None if tls is None else lambda *_: tls.context(),
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        sockets = None if isinstance(self._listener, Path) else [self._listener]
        self._task = asyncio.create_task(self._server.serve(sockets=sockets))

    async def run_until(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set or the server has ended; raises the server's error."""
        assert self._task is not None, "started first"
        waiter = asyncio.create_task(stop.wait())
        await asyncio.wait((waiter, self._task), return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self, grace_s: int) -> None:
        """Closes the listener; open responses get `grace_s` seconds."""
        assert self._task is not None, "started first"
        self._server.config.timeout_graceful_shutdown = grace_s
        self._server.should_exit = True
        await self._task

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert isinstance(self._listener, socket.socket), "a path has no port"
        return int(self._listener.getsockname()[1])


def listen(
    host: str, port: int, *, is_shared: bool = False, backlog: int | None = _BACKLOG
) -> socket.socket:
    """Returns a listening socket.

    Args:
        is_shared: other sockets may listen on the address; the kernel spreads connections.
        backlog: None reserves the address without listening.

    Raises:
        SettingsError: the address is in use or not this host's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        if backlog is not None:
            listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise SettingsError((f"cannot listen on {host}:{port}: {error.strerror}",)) from error
    listener.setblocking(False)
    return listener


class JsonRoute(APIRoute):
    """A route that reads its body with `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def with_parser(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return with_parser


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


def parse_json(content: bytes, field: str = "") -> Any:
    """Returns the value of JSON text.

    Args:
        field: the field that `content` came in; empty for a whole body.

    Raises:
        InvalidArgument: `content` is not JSON, holds a lone surrogate or is nested too deeply.
    """
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise _malformed(content, field, error) from error
    # With few opening brackets the nesting cannot be too deep.
    if sum(content.count(bracket) for bracket in _OPENING) > MAX_DEPTH:
        _check_depth(value, field)
    return value


def _malformed(content: bytes, field: str, error: orjson.JSONDecodeError) -> InvalidArgument:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    for path, text in _texts(value, field):
        if _has_surrogate(text):
            return _not_unicode(path)
    what = field or "the body"
    if "depth" in error.msg:
        return _too_deep(what)
    message = f"{what} is not JSON: {error.msg} at character {error.pos}"
    return InvalidArgument.of("JSON_INVALID", field, message) if field else InvalidArgument(
        message, reason="JSON_INVALID"
    )  # fmt: skip


def _not_unicode(path: str) -> InvalidArgument:
    message = f"{path or 'the body'} holds half a surrogate pair; text must be Unicode"
    if not path:
        return InvalidArgument(message, reason="TEXT_NOT_UNICODE")
    return InvalidArgument.of("TEXT_NOT_UNICODE", path, message)


def _too_deep(path: str) -> InvalidArgument:
    message = f"{path} is nested too deeply; JSON may have {MAX_DEPTH} levels"
    return InvalidArgument.of("JSON_TOO_DEEP", path, message)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields each text with the path of its field; a key counts as text of its object."""
    unvisited = [(path, value)]
    while unvisited:
        path, value = unvisited.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            for key, inner in value.items():
                yield path, key
                shown = f"{path}.{key}" if path else key
                unvisited.append((shown[:_MAX_SHOWN_PATH], inner))
        elif isinstance(value, list):
            unvisited += [(f"{path}[{n}]", inner) for n, inner in enumerate(value)]


def _check_depth(value: Any, field: str) -> None:
    """Walks level by level: recursion would use the stack for each level."""
    level: list[tuple[str, Any]] = [(field, value)]
    for _ in range(MAX_DEPTH):
        next_level: list[tuple[str, Any]] = []
        for top, outer in level:
            if isinstance(outer, dict):
                items = outer.items()
                next_level += [(top or key, v) for key, v in items if type(v) in (dict, list)]
            elif isinstance(outer, list):
                next_level += [(top, v) for v in outer if type(v) in (dict, list)]
        if not next_level:
            return
        level = next_level
    raise _too_deep(level[0][0] or "the body")


# Pure ASGI middleware, because Starlette's function style costs a task switch for every chunk. All
# scopes are HTTP scopes: the server has no others.


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
    key as `Authorization: Bearer KEY`, Anthropic's as `x-api-key: KEY`. Requests that only read or
    delete do not count against the limits: they cost nearly nothing.
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
        is_reading = scope["method"] in _READING and path != _GENERATING_GET
        if is_reading or _FREE_PATHS.fullmatch(path):
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
    """Refuses a body that is compressed, too large, with or without a content length, or does not
    arrive in time. Also refuses bodies while all arriving bodies together take too much memory."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._settings = settings
        self._num_buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            message = f"content-encoding is {encoding[:64]!r}; bodies must not be compressed"
            problem = Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "body_encoded")
            await problem.response(scope["path"])(scope, receive, send)
            return
        length = headers.get("content-length", "0")
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
