"""A streamed chat over a bare socket: a client cheap enough to outrun a gateway on one core."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import time
from dataclasses import dataclass, field

import orjson

from tests.load.synthetic_target import age_us

_TOKEN_IDS = re.compile(rb'"token_ids":\[([\d,]+)\]')
_LAST = b"0\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)  # closing sends RST, as a client that crashes does


@dataclass(slots=True)
class StreamCounts:
    """What streams brought.

    Attributes:
        ages_us: age of the newest tokens of some reads, as the synthetic target spelled them.
    """

    num_streams: int = 0
    num_chunks: int = 0
    num_failed: int = 0
    ages_us: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Where to, and what to ask.

    Attributes:
        vocab_size: of the synthetic target; 0 does not look at token times.
        warm_up_s: of each stream; token times are not looked at meanwhile: streams that start
            all at once wait for each other's prompts.
        sample: looks at the time of one read in so many.
    """

    host: str
    port: int
    num_tokens: int
    vocab_size: int = 0
    warm_up_s: float = 0.0
    sample: int = 8

    def request(self) -> bytes:
        body = orjson.dumps(
            {
                "messages": [{"role": "user", "content": "Tell me the time."}],
                "max_tokens": self.num_tokens,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": bool(self.vocab_size),
            }
        )
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: load\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class StreamClient:
    """One connection that asks again and again."""

    def __init__(self, settings: StreamSettings, counts: StreamCounts) -> None:
        self._settings = settings
        self._counts = counts
        self._request = settings.request()
        self._num_reads = 0

    async def run(self, num_requests: int) -> None:
        """Sends requests one after the other; a failed one opens a new connection."""
        for _ in range(num_requests):
            try:
                reader, writer = await asyncio.open_connection(
                    self._settings.host, self._settings.port, limit=2**20
                )
            except OSError:
                self._counts.num_failed += 1
                continue
            try:
                await self._one(reader, writer)
            except OSError:
                self._counts.num_failed += 1
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def leave_after_first_chunk(self) -> None:
        """Opens a stream, reads a little and resets the connection."""
        reader, writer = await asyncio.open_connection(self._settings.host, self._settings.port)
        writer.write(self._request)
        with contextlib.suppress(OSError):
            await reader.read(64)
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
        self._counts.num_streams += 1

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._request)
        tail, warm_s = b"", time.monotonic() + self._settings.warm_up_s
        while not tail.endswith(_LAST):
            data = await reader.read(2**18)
            if not data:
                self._counts.num_failed += 1
                return
            # An event may be split between two reads: its end is counted, not its start.
            self._counts.num_chunks += (tail[-1:] + data).count(b"\n\n")
            if time.monotonic() >= warm_s:
                self._look(data)
            tail = (tail + data)[-len(_LAST) :]
        self._counts.num_streams += 1

    def _look(self, data: bytes) -> None:
        settings, number = self._settings, self._num_reads
        self._num_reads += 1
        if not settings.vocab_size or number % settings.sample:
            return
        found = _TOKEN_IDS.findall(data)
        if found:
            now_us = time.monotonic_ns() // 1000
            token_ids = [int(each) for each in found[-1].split(b",")]
            self._counts.ages_us.append(age_us(token_ids, now_us, settings.vocab_size))
