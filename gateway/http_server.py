"""uvicorn, run by us: our signal handling, our drain."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from gateway.http_protocol import ConnectionLimits, protocol_with
from shared.errors import SettingsError
from shared.tls import ServerTls

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves the process's signals alone; a drain comes before uvicorn's own shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an ASGI application on a socket, or at a path of the file system."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket | Path,
        tls: ServerTls | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._listener = listener
        config = uvicorn.Config(
            app,
            uds=str(listener) if isinstance(listener, Path) else None,
            http=protocol_with(limits or ConnectionLimits()),
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
        """Returns when `stop` is set; raises what ended the server before that."""
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
    """Returns a socket that listens.

    Args:
        is_shared: other sockets may listen there, and the kernel spreads connections over them.
        backlog: None only takes the address.

    Raises:
        SettingsError: the address is taken or not this host's.
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
