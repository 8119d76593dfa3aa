"""A TCP relay that delays a connection and can cut it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHUNK_BYTES = 65_536


class Relay:
    """Relays bytes to `address` and back, in order, each `delay_s` after it arrived.

    Attributes:
        port: the port it listens on.
        num_bytes: bytes relayed so far: to the address, and back.
    """

    def __init__(self, address: str, delay_s: float) -> None:
        host, port = address.rsplit(":", 1)
        self._host, self._port = host, int(port)
        self._delay_s = delay_s
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.num_bytes = [0, 0]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Drops every connection with all bytes under way; accepts new connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            remote_reader, remote_writer = await asyncio.open_connection(self._host, self._port)
            try:
                await asyncio.gather(
                    self._carry(reader, remote_writer, 0), self._carry(remote_reader, writer, 1)
                )
            finally:
                remote_writer.close()
        except (OSError, asyncio.CancelledError):
            pass  # the connection is cut; both ends notice
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int
    ) -> None:
        """Reads at once and writes later, so that the delay costs no bandwidth."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def write() -> None:
            while True:
                due_s, chunk = await queue.get()
                await asyncio.sleep(max(due_s - loop.time(), 0.0))
                writer.write(chunk)
                await writer.drain()
                if not chunk:
                    return

        writing = asyncio.create_task(write())
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                self.num_bytes[direction] += len(chunk)
                queue.put_nowait((loop.time() + self._delay_s, chunk))
            queue.put_nowait((loop.time(), b""))
            await writing
            with contextlib.suppress(OSError):
                writer.write_eof()
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


@asynccontextmanager
async def relayed(address: str, delay_s: float) -> AsyncIterator[Relay]:
    """Relays to an address while the context is open."""
    relay = Relay(address, delay_s)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()
