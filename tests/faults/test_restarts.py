"""Targets and gateways that go and come back under load."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from gateway.settings import GatewaySettings
from tests.gateway.driving import CHAT, MakeGateway, events, eventually, http_client
from tests.gateway.test_process import ROOT, free_port, is_ready
from tests.helpers.fake_target import FakeTarget

STREAM = {**CHAT, "stream": True, "max_tokens": 30, "ignore_eos": True}
NUM_WORKERS, NUM_REQUESTS = 8, 25


async def test_no_request_that_had_not_started_fails_when_one_of_two_targets_restarts(
    make_gateway: MakeGateway, target: FakeTarget, second_target: FakeTarget
) -> None:
    gateway = await make_gateway(target, second_target)
    answers: list[httpx.Response] = []

    async def work(client: httpx.AsyncClient) -> None:
        for _ in range(NUM_REQUESTS):
            answer = await client.post("/v1/chat/completions", json=STREAM)
            answers.append(answer)

    async def restart() -> None:
        for _ in range(3):
            port, epoch = target.port, gateway.pool.links[0].epoch
            await target.until(lambda: len(target.submits) > 0)
            await target.stop()
            await eventually(lambda: gateway.pool.links[0].num_live == 0)
            await target.start(port)
            await eventually(lambda before=epoch: gateway.pool.links[0].epoch > before)

    async with http_client(gateway) as client:
        workers = [asyncio.create_task(work(client)) for _ in range(NUM_WORKERS)]
        await restart()
        await asyncio.gather(*workers)
    assert len(answers) == NUM_WORKERS * NUM_REQUESTS
    assert {answer.status_code for answer in answers} == {200}
    broken = [events(answer.content) for answer in answers if b"[DONE]" not in answer.content]
    for each in broken:  # its client was told, after the first tokens
        assert each[-1]["error"]["code"] == "target_lost"
        assert "choices" in each[0]
    assert gateway.pool.links[0].epoch == 4
    assert gateway.pool.num_live == 0


async def test_a_draining_target_finishes_while_the_other_takes_over(
    make_gateway: MakeGateway, target: FakeTarget, second_target: FakeTarget
) -> None:
    gateway = await make_gateway(target, second_target)
    target.hold_after = second_target.hold_after = 1
    async with http_client(gateway) as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", json=STREAM))
        await eventually(lambda: bool(target.submits or second_target.submits))
        busy = target if target.submits else second_target
        other = second_target if busy is target else target
        await busy.lifecycle.drain()
        await eventually(lambda: sum(not each.detail for each in gateway.pool.links) == 1)
        later = asyncio.create_task(client.post("/v1/chat/completions", json=STREAM))
        await other.until(lambda: len(other.submits) == 1)
        target.release.set()
        second_target.release.set()
        for answer in (await first, await later):
            assert events(answer.content)[-1] == "[DONE]"


@asynccontextmanager
async def _gateway_process(
    target: FakeTarget, model_folder: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """A gateway of its own, and a client of it; killed when it is still there at the end."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gateway", "--port", str(port), "--maintenance-port", "0"),
        *("--target", target.address, "--tokenizer", str(model_folder)),
        cwd=ROOT,
        env={**os.environ, "OUTRIDER_GATEWAY_LOG_LEVEL": "error"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            while not await is_ready(client, url):
                assert process.returncode is None
                await asyncio.sleep(0.05)
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_gateway_that_is_killed_leaves_nothing_running_and_its_successor_serves(
    target: FakeTarget, model_folder: Path
) -> None:
    target.hold_after = 1
    async with _gateway_process(target, model_folder) as (process, client):
        stream = asyncio.create_task(client.post("/v1/chat/completions", json=STREAM))
        await target.until(lambda: target.num_open == 1)
        process.kill()
        with pytest.raises(httpx.TransportError):
            await stream
    await eventually(lambda: target.num_open == 0)
    target.release.set()
    async with _gateway_process(target, model_folder) as (_, client):
        answer = await client.post("/v1/chat/completions", json=STREAM)
    assert events(answer.content)[-1] == "[DONE]"


async def test_a_requests_time_travels_to_the_target(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    settings = GatewaySettings(request_timeout_s=1.5)
    gateway = await make_gateway(target, settings=settings)
    async with http_client(gateway) as client:
        await client.post("/v1/chat/completions", json={**STREAM, "max_tokens": 2})
    assert target.submits[0].timeout_duration.ToMilliseconds() == 1500
