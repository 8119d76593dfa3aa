"""What a client may keep open or send: connections, headers, slow and unfinished bodies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import httpx
import orjson
import pytest
import pytest_asyncio

from gateway.api_keys import KeyLimits, Quotas, Scope, keys_from_file, keys_from_texts
from gateway.app import Gateway, create_app
from gateway.http_server import HttpServer, listen
from gateway.process import maintenance_server
from gateway.settings import GatewaySettings
from shared.errors import SettingsError
from shared.rpc.admin_service import AdminHooks, ProcessInfo
from shared.rpc.channel import open_channel
from shared.rpc.server import Lifecycle, bind
from shared.telemetry.logs import JsonFormatter, TextFormatter
from tests.gateway.driving import CHAT, MakeGateway, eventually
from tests.helpers.fake_target import FakeTarget

Serve = Callable[[Gateway, GatewaySettings], int]


@pytest_asyncio.fixture
async def serve_with() -> AsyncIterator[Serve]:
    servers: list[HttpServer] = []

    def start(gateway: Gateway, settings: GatewaySettings) -> int:
        server = HttpServer(create_app(gateway), listen("127.0.0.1", 0), settings)
        server.start()
        servers.append(server)
        return server.port

    yield start
    for server in servers:
        await server.stop(1)


async def _said(port: int, *parts: bytes) -> bytes:
    """Sends parts and returns all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 30.0)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_headers_that_come_too_slowly_end_the_connection(
    gateway: Gateway, serve_with: Serve
) -> None:
    port = serve_with(gateway, GatewaySettings(header_timeout_s=0.05))
    for begun in (b"", b"GET /health HTTP/1.1\r\nhost: x\r\n"):
        answer = await _said(port, begun)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer


async def test_the_time_of_headers_is_over_when_they_are_there(
    gateway: Gateway, serve_with: Serve, target: FakeTarget
) -> None:
    target.hold_after = 1
    for timeout_s in (0.3, 3.0, 30.0):  # in which a busy machine may not even send headers
        port = serve_with(gateway, GatewaySettings(header_timeout_s=timeout_s))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            answer = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            while not (target.submits or answer.done()):
                await asyncio.sleep(0.002)
            if target.submits:
                await asyncio.sleep(1.3 * timeout_s)
                target.release.set()
                assert (await answer).status_code == 200
                return
            await asyncio.gather(answer, return_exceptions=True)
    pytest.fail("no headers came in time")


async def test_large_headers_are_refused(gateway: Gateway, serve_with: Serve) -> None:
    port = serve_with(gateway, GatewaySettings(max_header_bytes=2048))
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    whole = head + b"x-a: " + b"a" * 3000 + b"\r\n\r\n"
    for parts in ((whole,), (head + b"x-a: ", *(b"a" * 500 for _ in range(5)))):
        assert (await _said(port, *parts)).startswith(b"HTTP/1.1 431 ")
    with_body = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    body = orjson.dumps({"prompt": "then " * 1000})
    small = with_body + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert (await _said(port, small + body)).startswith(b"HTTP/1.1 200 ")


async def test_more_connections_than_allowed_are_turned_away(
    gateway: Gateway, serve_with: Serve
) -> None:
    port = serve_with(gateway, GatewaySettings(max_connections=1))
    _, first = await asyncio.open_connection("127.0.0.1", port)
    first.write(b"G")
    await first.drain()
    await asyncio.sleep(0)
    assert (await _said(port)).startswith(b"HTTP/1.1 503 ")
    first.close()
    await first.wait_closed()
    request = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with asyncio.timeout(30.0):
        while not (await _said(port, request)).startswith(b"HTTP/1.1 200 "):
            await asyncio.sleep(0.01)


async def test_a_body_that_does_not_come_is_given_up(
    make_gateway: MakeGateway, target: FakeTarget, serve_with: Serve
) -> None:
    gateway = await make_gateway(target, settings=GatewaySettings(body_timeout_s=0.05))
    port = serve_with(gateway, GatewaySettings())
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    answer = await _said(port, head + b"content-length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"0.05 s" in answer


async def test_unfinished_bodies_are_bounded_together(
    make_gateway: MakeGateway, target: FakeTarget, serve_with: Serve
) -> None:
    gateway = await make_gateway(target, settings=GatewaySettings(max_buffered_bytes=10_000))
    port = serve_with(gateway, GatewaySettings())
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    begun = head + b"content-length: 9000\r\n\r\n" + b" " * 6000
    _, first = await asyncio.open_connection("127.0.0.1", port)
    first.write(begun)
    await first.drain()
    # The first body may not have been read yet when the second arrives, so one of three is refused.
    answers = [asyncio.create_task(_first_line(port, begun)) for _ in range(2)]
    done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    assert all(b"503" in task.result() for task in done)
    for task in waiting:
        task.cancel()
    first.close()


async def _first_line(port: int, content: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    line = await asyncio.wait_for(reader.readline(), 30.0)
    writer.close()
    return line


async def test_a_key_reaches_its_own_requests_only(
    make_gateway: MakeGateway, target: FakeTarget, serve: Callable[[Gateway], str]
) -> None:
    target.hold_after = 1
    keys = keys_from_texts(["alice:a", "bob:b"], KeyLimits())
    gateway = await make_gateway(target, quotas=Quotas(keys))
    alice, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
    async with httpx.AsyncClient(base_url=serve(gateway), timeout=30.0) as client:
        headers = {**alice, "x-request-id": "mine"}
        mine = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers=headers))
        await eventually(lambda: gateway.lifecycle.num_open == 1)
        for body in ({"rid": "mine"}, {"abort_all": True}):
            told = await client.post("/abort_request", json=body, headers=bob)
            assert told.json() == {"aborted_request_count": 0}
        refused = await client.post("/flush_cache", headers=bob)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "scope_too_narrow"
        assert "'bob'" in refused.json()["error"]["message"]
        told = await client.post("/abort_request", json={"abort_all": True}, headers=alice)
        assert told.json() == {"aborted_request_count": 1}
        assert (await mine).status_code == 410


async def test_bytes_that_are_no_message_are_an_invalid_argument() -> None:
    info = ProcessInfo("gateway", "0", 1.0, {})
    server = await maintenance_server(info, Lifecycle([]), AdminHooks(drain=_drained))
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    async with open_channel(address) as channel:
        drain = channel.unary_unary("/outrider.admin.v1.AdminService/DrainServer")
        for content, code in (
            (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
            (b"\x00" * 100_000, grpc.StatusCode.RESOURCE_EXHAUSTED),  # more than it reads at all
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drain(content)
            assert caught.value.code() is code
            assert "Exception" not in (caught.value.details() or "")
        watch = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in watch(iter([b"\xff\xff\xff"])):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(None)


async def _drained(grace_s: float) -> int:
    return 0


def test_a_long_message_is_cut_in_the_log() -> None:
    record = logging.makeLogRecord({"msg": "x" * 50_000, "levelname": "INFO", "note": "y" * 9000})
    for formatter in (TextFormatter("gateway"), JsonFormatter("gateway")):
        line = formatter.format(record)
        assert len(line) < 9000
        assert "50,000 characters" in line


def test_a_key_file_says_what_keys_are_for(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[keys.a]\nkey = "1"\n[keys.b]\nkey = "2"\nscope = "operate"\n')
    first, second = keys_from_file(path, KeyLimits())
    assert (first.scope, second.scope) == (Scope.USE, Scope.OPERATE)
    path.write_text('[keys.a]\nkey = "1"\nscope = "root"\n')
    with pytest.raises(SettingsError, match=r"scope is 'root'.*use, operate, admin"):
        keys_from_file(path, KeyLimits())


def test_a_gateway_has_no_rounds_to_log() -> None:
    with pytest.raises(SettingsError, match="--round-log"):
        GatewaySettings(round_log=Path("rounds.jsonl"))
