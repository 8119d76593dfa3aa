"""Networks that go silent instead of breaking."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.pool import TargetPool
from gateway.settings import GatewaySettings
from gateway.target_link import LinkTiming
from shared.rpc import channel
from tests.gateway.driving import eventually
from tests.helpers.fake_target import FakeTarget


class SilentProxy:
    """Forwards TCP until it is frozen; then it swallows everything and closes nothing.

    That is what a peer sees of a host that lost power, or of a firewall that forgot a connection.
    """

    def __init__(self, port: int) -> None:
        self.is_frozen = False
        self.num_connections = 0
        self._upstream = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    if not self.is_frozen:
                        sink.write(data)
        finally:
            sink.close()


async def test_a_half_open_connection_is_found_by_pings_and_dialled_again(
    sha256: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In production 20 s and 10 s; the test has less time. Before the target starts, which would
    # take more pings than it allows for an attack.
    monkeypatch.setattr(channel, "KEEPALIVE_INTERVAL_MS", 300)
    monkeypatch.setattr(channel, "KEEPALIVE_TIMEOUT_MS", 300)
    async with FakeTarget(sha256) as target:
        proxy = SilentProxy(target.port)
        async with proxy as address, _pool(address, sha256) as pool:
            [link] = pool.links
            await eventually(lambda: pool.is_serving)
            epoch, proxy.is_frozen = link.epoch, True
            await eventually(lambda: not pool.is_serving)
            assert "UNAVAILABLE" in link.detail
            proxy.is_frozen = False
            # Where this process is held up, pings are late now and then, frozen or not.
            await eventually(lambda: pool.is_serving and link.epoch > epoch)
        assert proxy.num_connections >= 2


@contextlib.asynccontextmanager
async def _pool(address: str, sha256: str) -> AsyncIterator[TargetPool]:
    timing = LinkTiming(first_backoff_s=0.01, longest_backoff_s=0.05)
    pool = TargetPool(GatewaySettings(target=(address,)), sha256, timing)
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def test_both_ends_ping_each_other_on_silent_streams() -> None:
    for chosen in (dict(channel.channel_options()), dict(channel.server_options())):
        assert chosen["grpc.keepalive_time_ms"] == 20_000
        assert chosen["grpc.keepalive_timeout_ms"] == 10_000
        assert chosen["grpc.http2.ping_timeout_ms"] == 10_000
        assert chosen["grpc.keepalive_permit_without_calls"] == 1
