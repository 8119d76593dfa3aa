"""`--workers`: several processes behind one port that answer as one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from gateway.settings import GatewaySettings
from gateway.workers import Reply, _best, _health, _summed
from shared.errors import SettingsError
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as pb_grpc
from shared.rpc.channel import open_channel
from shared.settings import load_settings
from tests.gateway.driving import CHAT, eventually
from tests.helpers.fake_target import FakeTarget
from tests.helpers.serving import free_ports

ROOT = Path(__file__).parents[2]
Running = tuple[asyncio.subprocess.Process, str, str]


@pytest_asyncio.fixture
async def workers(target: FakeTarget, model_folder: Path, tmp_path: Path) -> AsyncIterator[Running]:
    """A gateway of two workers, its URL and its maintenance address."""
    ports = free_ports(2)
    port, maintenance = next(ports), next(ports)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gateway", "--workers", "2", "--port", str(port)),
        *("--maintenance-port", str(maintenance), "--response-store", str(tmp_path / "kept")),
        *("--target", target.address, "--tokenizer", str(model_folder)),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OUTRIDER_GATEWAY_LOG_LEVEL": "error"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(300.0):  # three processes load, on cores that others use
            while not await _is_ready(url):
                assert process.returncode is None, await process.communicate()
                await asyncio.sleep(0.05)
        yield process, url, f"127.0.0.1:{maintenance}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def _is_ready(url: str) -> bool:
    try:
        # What certificates there are is read by each client that may need them.
        async with httpx.AsyncClient(verify=False) as client:
            found = await client.get(f"{url}/ready")
    except httpx.TransportError:
        return False
    return found.status_code == 200 and found.json()["workers"] == ["serving", "serving"]


def _worker_of(pid: int) -> int:
    """Returns the process of one of a gateway's workers."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {int(each): Path(f"/proc/{each}/cmdline").read_text() for each in children}
    return next(pid for pid, command in commands.items() if "spawn_main" in command)


async def test_workers_answer_as_one_gateway(workers: Running, target: FakeTarget) -> None:
    gateway, url, maintenance = workers
    clients = [httpx.AsyncClient(base_url=url, timeout=60.0, verify=False) for _ in range(16)]
    body = {"model": "fake", "input": "then", "background": True, "max_output_tokens": 16}

    started = [(await client.post("/v1/responses", json=body)).json() for client in clients]
    async with asyncio.timeout(60.0):
        while (await clients[0].get("/load")).json() != {"server_load": 0}:
            await asyncio.sleep(0.01)
    samples = [
        sample
        for family in text_string_to_metric_families((await clients[0].get("/metrics")).text)
        for sample in family.samples
        if sample.name == "outrider_gateway_requests_total"
    ]
    # The kernel spreads sixteen connections over both but once in 32,768 times.
    assert {sample.labels["worker"] for sample in samples} == {"0", "1"}
    assert sum(sample.value for sample in samples) == len(clients)
    for client, response in zip(reversed(clients), started, strict=True):
        found = await client.get(f"/v1/responses/{response['id']}")
        assert found.json()["status"] == "completed"

    target.hold_after = 0
    held = (await clients[0].post("/v1/responses", json={**body, "stream": False})).json()["id"]
    await eventually(lambda: target.num_open == 1)
    assert [(await client.get("/load")).json() for client in clients] == [{"server_load": 1}] * 16
    for probe in ("/health", "/ready", "/ping"):
        probed = await clients[0].head(probe)
        assert (probed.status_code, probed.content) == (200, b"")
        assert (await clients[0].get(probe)).json()["workers"] == ["serving", "serving"]
        assert (await clients[0].delete(probe)).status_code == 405
    for path in ("/metrics", "/load"):
        refused = await clients[0].put(path)
        assert refused.json()["error"]["message"] == f"there is no PUT {path}; see /docs"
    cancelled = [(await client.post(f"/v1/responses/{held}/cancel")).json() for client in clients]
    assert {each["status"] for each in cancelled} == {"cancelled"}

    chats = [asyncio.create_task(each.post("/v1/chat/completions", json=CHAT)) for each in clients]
    await eventually(lambda: target.num_open == len(clients))
    async with open_channel(maintenance) as channel:
        stub = pb_grpc.AdminServiceStub(channel)
        info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60.0)
    assert info.gauges["worker_count"] == 2
    assert info.gauges["open_request_count"] == len(clients)
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as operator:
        ended = await operator.post("/abort_request", json={"abort_all": True})
    assert ended.json() == {"aborted_request_count": len(clients)}
    assert [(await chat).status_code for chat in chats] == [410] * len(clients)
    for client in clients:
        await client.aclose()

    gateway.send_signal(signal.SIGTERM)
    assert await gateway.wait() == 0


async def test_a_worker_that_dies_ends_the_gateway(workers: Running) -> None:
    gateway, url, _ = workers
    os.kill(_worker_of(gateway.pid), signal.SIGKILL)
    _, log = await gateway.communicate()
    assert gateway.returncode == 1
    assert "ended with exit code -9" in log.decode()
    assert not await _is_ready(url)


def test_a_store_in_memory_is_one_processs() -> None:
    with pytest.raises(SettingsError, match="--workers above 1 need a file"):
        load_settings(
            GatewaySettings,
            service="gateway",
            arguments=["--workers", "2", "--response-store", "memory"],
            env={},
        )


def test_what_one_worker_cannot_do_another_may_have_done() -> None:
    missing, found = Reply(404, "", b"{}"), Reply(200, "", b'{"deleted": true}')
    assert _best([missing, found]) is found
    running, over = Reply(200, "", b'{"status":"queued"}'), Reply(200, "", b'{"status":"failed"}')
    assert _best([running, over]) is over


def test_counts_are_added_and_the_rest_is_the_first_ones() -> None:
    first = Reply(200, "", b'{"version":"1","targets":[{"state":"x","live_request_count":2}]}')
    other = Reply(200, "", b'{"version":"2","targets":[{"state":"y","live_request_count":3}]}')
    body = b'{"version":"1","targets":[{"state":"x","live_request_count":5}]}'
    assert _summed([first, other]).body == body


def test_one_worker_that_does_not_serve_is_bad_health() -> None:
    replies = [Reply(200, "", b'{"status":"serving"}'), Reply(503, "", b'{"status":"not_serving"}')]
    reply = _health(replies)
    assert reply.status == 503
    assert reply.body == b'{"status":"not_serving","workers":["serving","not_serving"]}'
