"""The order in which a process ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.rpc.server import State, stop_servers
from tests.helpers.scripted_server import scripted_server


async def test_process_reports_not_serving_and_still_answers_while_it_drains() -> None:
    seen: list[Any] = []

    async def answer(request: bytes, context: Any) -> bytes:
        return b"!"

    async with scripted_server(unary_unary=answer) as serving:
        await serving.lifecycle.activate()
        health = health_pb2_grpc.HealthStub(serving.channel)

        async def drain(grace_s: float) -> int:
            status = (await health.Check(health_pb2.HealthCheckRequest())).status
            seen.extend([grace_s, status, serving.lifecycle.state])
            seen.append(await serving.call("unary_unary"))
            return 0

        await stop_servers([serving.server], serving.lifecycle, drain, grace_s=30)
    assert seen == [30, health_pb2.HealthCheckResponse.NOT_SERVING, State.DRAINING, b"!"]


async def test_open_health_watch_does_not_burn_the_grace() -> None:
    async def drain(grace_s: float) -> int:
        return 0

    async with scripted_server() as serving:
        watch = health_pb2_grpc.HealthStub(serving.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        stopping = stop_servers([serving.server], serving.lifecycle, drain, grace_s=60)
        await asyncio.wait_for(stopping, 60)


async def test_drain_that_hangs_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    async def drain(grace_s: float) -> int:
        await asyncio.Event().wait()
        return 0

    async with scripted_server() as serving:
        await stop_servers([serving.server], serving.lifecycle, drain, grace_s=0)
        await asyncio.wait_for(serving.server.wait_for_termination(), 60)
    assert "longer than the 0 s" in caplog.text


async def test_requests_that_are_cut_off_are_counted_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def drain(grace_s: float) -> int:
        return 3

    caplog.set_level(logging.INFO)
    async with scripted_server() as serving:
        await stop_servers([serving.server], serving.lifecycle, drain, grace_s=1)
    assert "3 requests are cut off" in caplog.text
