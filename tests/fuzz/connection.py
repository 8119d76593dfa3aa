"""A client of the fuzzer: one kept connection, parsed by httptools, cheap beside the server."""

from __future__ import annotations

import asyncio
from typing import Self

import httptools

_TIMEOUT_S = 30.0


class _Answer(asyncio.Protocol):
    """Reads one answer after the other."""

    def __init__(self) -> None:
        self.status: asyncio.Future[int] | None = None
        self.transport: asyncio.Transport | None = None
        self.has_begun = False
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.has_begun = True
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        code = self._parser.get_status_code()
        if not self._parser.should_keep_alive() and self.transport is not None:
            self.transport.close()
        self._parser = httptools.HttpResponseParser(self)
        if self.status is not None and not self.status.done():
            self.status.set_result(code)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self.status is not None and not self.status.done():
            self.status.set_exception(ConnectionResetError("closed before the answer's end"))


class Connection:
    """Sends requests one after the other; opens itself again where the server has closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._answer = _Answer()

    async def request(self, method: str, path: str, content: bytes) -> int:
        """Returns the status, when the whole answer has come.

        Raises:
            ConnectionError: the server closed before the end of its answer.
            TimeoutError: there was no end in 30 s.
        """
        is_kept = self._is_open()
        try:
            return await self._send(method, path, content)
        except ConnectionError:
            # A kept connection may close, idle, while a request is on its way.
            if not is_kept or self._answer.has_begun:
                raise
        return await self._send(method, path, content)

    async def _send(self, method: str, path: str, content: bytes) -> int:
        loop = asyncio.get_running_loop()
        if not self._is_open():
            _, self._answer = await loop.create_connection(_Answer, "127.0.0.1", self._port)
        answer = self._answer
        assert answer.transport is not None, "opened above"
        answer.status, answer.has_begun = loop.create_future(), False
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        answer.transport.write(head.encode() + content)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await answer.status
        except TimeoutError:
            if answer.transport is not None:  # the server may close at the same time
                answer.transport.abort()
            raise

    def _is_open(self) -> bool:
        transport = self._answer.transport
        return transport is not None and not transport.is_closing()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._answer.transport is not None:
            self._answer.transport.close()
