"""uvicorn with the gateway's own signal handling and drain, and with limits on connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.settings import GatewaySettings
from shared.errors import SettingsError

BODY_WRITER = "outrider.body_writer"  # key of the `BodyWriter` in an ASGI scope's extensions
_TOO_MANY = b"503 Service Unavailable"
_TOO_SLOW = b"408 Request Timeout"
_TOO_LARGE = b"431 Request Header Fields Too Large"

_BACKLOG = 2048


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
            self._refuse(_TOO_MANY)

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
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._expect_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._deadline.cancel()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self._settings.max_header_bytes:
            self._refuse(_TOO_LARGE)
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
        self._deadline = loop.call_later(self._settings.header_timeout_s, self._refuse, _TOO_SLOW)

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
