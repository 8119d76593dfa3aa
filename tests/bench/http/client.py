"""A streamed completion over a bare socket: cheap enough for hundreds of streams a process.

Only the first and the last bytes of an answer are looked at; token counts are the server's.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson

from tests.bench.http.answers import Answer

_END = b"0\r\n\r\n"
_EVENT = b"data: "
_TAIL_BYTES = 8192
_READ_BYTES = 2**18
_COUNTS = {
    name: re.compile(rb'"%b":(\d+)' % key)
    for name, key in (
        ("num_tokens", b"completion_tokens"),
        ("num_accepted", b"accepted_prediction_tokens"),
        ("num_prompt", b"prompt_tokens"),
        ("num_cached", b"cached_tokens"),
        ("num_verified", b"num_spec_steps"),
    )
}


@dataclass(frozen=True, slots=True)
class Server:
    """Where to, and what every request says.

    Attributes:
        temperature: 0 is greedy.
    """

    host: str
    port: int
    model: str
    temperature: float = 0.0

    def request(self, prompt: list[int], num_tokens: int, fields: Mapping[str, object]) -> bytes:
        body = orjson.dumps(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "temperature": self.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
                **fields,
            }
        )
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: bench\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class _ClosedWhileIdle(EOFError):
    """The server closed a kept connection before the request reached it, as servers do."""


class Connection:
    """One connection, kept from request to request; opened anew after a failure."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self,
        prompt: list[int],
        num_tokens: int,
        *,
        fields: Mapping[str, object] | None = None,
        due_s: float | None = None,
        on_first: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Sends one request and reads its stream to the end; a failure is in the answer.

        Args:
            fields: of the body, beside what every request says.
            due_s: when it should have been sent; now if None.
            on_first: called at the first token.
        """
        sent_s = time.monotonic() if due_s is None else due_s
        request = self._server.request(prompt, num_tokens, fields or {})
        try:
            try:
                return await self._ask(request, sent_s, on_first)
            except _ClosedWhileIdle:
                self.close()
                return await self._ask(request, sent_s, on_first)
        except (OSError, EOFError) as error:
            self.close()
            return _failed(sent_s, f"{type(error).__name__}: {error}")

    async def _ask(self, request: bytes, sent_s: float, on_first: Callable[[], None]) -> Answer:
        is_kept = self._streams is not None
        if self._streams is None:
            server = self._server
            self._streams = await asyncio.open_connection(server.host, server.port, limit=2**20)
        reader, writer = self._streams
        writer.write(request)
        first_s, head, tail = 0.0, b"", b""
        while not tail.endswith(_END):
            data = await reader.read(_READ_BYTES)
            if not data and is_kept and not head:
                raise _ClosedWhileIdle
            if not data:
                raise EOFError(f"the server closed the connection after {tail[-200:]!r}")
            if not first_s:
                head += data
                if b"\r\n\r\n" in head and not head.startswith(b"HTTP/1.1 200"):
                    self.close()
                    return _failed(sent_s, head[-400:].decode(errors="replace"))
                if _EVENT in head:
                    first_s = time.monotonic()
                    on_first()
            tail = (tail + data)[-_TAIL_BYTES:]
        return _read(tail, sent_s, first_s)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _read(tail: bytes, sent_s: float, first_s: float) -> Answer:
    """Reads the counts off the last event, which has the usage."""
    last = tail[tail.rfind(b'"usage":{') :]
    counts = {name: pattern.search(last) for name, pattern in _COUNTS.items()}
    if b'"usage":{' not in tail or counts["num_tokens"] is None:
        return _failed(sent_s, f"no usage at the end: {tail[-300:].decode(errors='replace')}")
    numbers = {name: int(found[1]) for name, found in counts.items() if found is not None}
    return Answer(due_s=sent_s, first_s=first_s, last_s=time.monotonic(), error=None, **numbers)


def _failed(sent_s: float, error: str) -> Answer:
    now_s = time.monotonic()
    return Answer(due_s=sent_s, first_s=now_s, last_s=now_s, error=error)
