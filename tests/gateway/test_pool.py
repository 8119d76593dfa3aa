"""Which target takes a request, and what happens when it cannot."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gateway.api_keys import KeyLimits, Quotas, keys_from_texts
from gateway.generation import TargetState
from gateway.schema import ChatCompletionRequest
from gateway.settings import GatewaySettings
from shared.errors import QueueFull
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from tests.gateway.driving import CHAT, MakeGateway, error_of, events, eventually, http_client
from tests.helpers.fake_target import FakeTarget

BODY = {**CHAT, "max_tokens": 3}
FULL = pb.RequestFailure(code=8, reason="QUEUE_FULL", message="full")
DRAINING = pb.RequestFailure(code=14, reason="SERVER_DRAINING", message="draining")


async def post(client: httpx.AsyncClient, **extra: object) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**BODY, **extra})


async def test_all_requests_of_a_target_share_one_session(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target)
    async with http_client(gateway) as client:
        responses = await asyncio.gather(*(post(client, n=2) for _ in range(8)))
    assert {response.status_code for response in responses} == {200}
    assert (len(target.submits), target.num_sessions) == (16, 1)
    assert len({submit.request_id for submit in target.submits}) == 16


async def test_the_target_with_the_fewest_reserved_tokens_is_picked(
    make_gateway: MakeGateway, target: FakeTarget, second_target: FakeTarget
) -> None:
    target.hold_after = second_target.hold_after = 0
    gateway = await make_gateway(target, second_target)
    async with http_client(gateway) as client:
        heavy = asyncio.create_task(post(client, max_tokens=1000))
        await eventually(lambda: gateway.pool.num_live == 1)
        light = [asyncio.create_task(post(client, max_tokens=10)) for _ in range(5)]
        await eventually(lambda: gateway.pool.num_live == 6)
        await asyncio.gather(
            target.until(lambda: len(target.submits) > 0),
            second_target.until(lambda: len(second_target.submits) > 0),
        )
        target.release.set()
        second_target.release.set()
        await asyncio.gather(heavy, *light)
    assert sorted((len(target.submits), len(second_target.submits))) == [1, 5]


@pytest.mark.parametrize("failure", [FULL, DRAINING])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_request_goes_to_the_next_target(
    make_gateway: MakeGateway,
    target: FakeTarget,
    second_target: FakeTarget,
    failure: pb.RequestFailure,
    stream: bool,
) -> None:
    target.refusals.append(failure)
    gateway = await make_gateway(target, second_target)
    async with http_client(gateway) as client:
        response = await post(client, stream=stream)
    assert response.status_code == 200
    assert (len(target.submits), len(second_target.submits)) == (1, 1)


async def test_a_target_that_does_not_read_is_passed_over(
    make_gateway: MakeGateway,
    target: FakeTarget,
    second_target: FakeTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = await make_gateway(target, second_target)
    full = gateway.pool.links[0]

    def refuse(*_: object) -> int:
        raise QueueFull.of(1, 1)

    monkeypatch.setattr(full, "submit", refuse)
    async with http_client(gateway) as client:
        assert (await post(client)).status_code == 200
        monkeypatch.setattr(gateway.pool.links[1], "submit", refuse)
        assert (await error_of(await post(client)))[::2] == (429, "queue_full")


async def test_when_all_are_full_the_client_is_told_so_at_once(
    make_gateway: MakeGateway, target: FakeTarget, second_target: FakeTarget
) -> None:
    target.refusals.append(FULL)
    second_target.refusals.append(FULL)
    gateway = await make_gateway(target, second_target)
    async with http_client(gateway) as client:
        assert (await error_of(await post(client)))[::2] == (429, "queue_full")


async def test_a_request_refused_everywhere_by_drains_is_a_503_after_the_window(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    target.refusals.append(DRAINING)
    gateway = await make_gateway(target, settings=GatewaySettings(retry_window_s=0.05))
    async with http_client(gateway) as client:
        assert (await error_of(await post(client)))[::2] == (503, "server_draining")
    assert gateway.pool.num_live == 0


async def test_a_request_lost_before_its_first_event_moves_to_another_target(
    make_gateway: MakeGateway, target: FakeTarget, second_target: FakeTarget
) -> None:
    target.is_mute = True
    gateway = await make_gateway(target, second_target)
    async with http_client(gateway) as client:
        request = asyncio.create_task(post(client))
        await target.until(lambda: len(target.submits) == 1)
        await target.break_sessions()
        assert (await request).status_code == 200
    assert len(second_target.submits) == 1


async def test_a_request_lost_before_its_first_event_waits_for_the_same_target_to_return(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    target.is_mute = True
    gateway = await make_gateway(target)
    async with http_client(gateway) as client:
        request = asyncio.create_task(post(client))
        await target.until(lambda: len(target.submits) == 1)
        target.is_mute = False
        await target.break_sessions()
        assert (await request).status_code == 200
    assert (len(target.submits), target.num_sessions) == (2, 2)


async def test_a_waiting_request_is_forgotten_when_its_client_leaves(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    target.refusals.append(DRAINING)
    gateway = await make_gateway(target, settings=GatewaySettings(retry_window_s=60.0))
    model = gateway.pool.model("fake")
    body = ChatCompletionRequest.model_validate(BODY)
    plan = await gateway.planner.chat(body, model)
    routed = gateway.pool.submit(plan.generations[0], "fake", lambda event: None)
    await eventually(lambda: gateway.pool.num_waiting == 1)
    routed.cancel()
    assert gateway.pool.num_live == 0


async def test_a_whole_answer_lost_after_its_first_event_is_an_error(
    make_gateway: MakeGateway, target: FakeTarget, second_target: FakeTarget
) -> None:
    target.hold_after = 1
    gateway = await make_gateway(target, second_target)
    async with http_client(gateway) as client:
        request = asyncio.create_task(post(client, max_tokens=100))
        await target.until(lambda: len(target.submits) == 1)
        await eventually(lambda: gateway.pool.links[0].num_tokens > 0)
        await target.break_sessions()
        assert (await error_of(await request))[::2] == (503, "target_lost")
    assert second_target.submits == []


async def test_a_target_with_another_tokenizer_is_never_used_and_health_says_so(
    make_gateway: MakeGateway, target: FakeTarget, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeTarget("0" * 64) as stranger:
        gateway = await make_gateway(target, stranger, num_serving=1)
        await eventually(lambda: gateway.pool.links[1].state is TargetState.MISMATCHED)
        async with http_client(gateway) as client:
            for _ in range(3):
                assert (await post(client)).status_code == 200
            health = (await client.get("/health")).json()
        assert stranger.submits == []
        detail = health["targets"][1]
        assert detail["state"] == "mismatched"
        assert "0" * 64 in detail["detail"]
        assert stranger.address in caplog.text
        assert any(record.levelname == "ERROR" for record in caplog.records)


async def test_health_is_503_without_a_serving_target(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target)
    async with http_client(gateway) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        await target.lifecycle.drain()
        await eventually(lambda: not gateway.pool.is_serving)
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["targets"][0]["state"] == "not_serving"
        assert (await error_of(await post(client)))[::2] == (503, "no_target")
        await target.lifecycle.activate()
        await eventually(lambda: gateway.pool.is_serving)
        assert (await post(client)).status_code == 200
    assert target.num_sessions == 1


async def test_a_draining_target_finishes_what_it_has(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    target.hold_after = 1
    gateway = await make_gateway(target)
    async with http_client(gateway) as client:
        request = asyncio.create_task(post(client, stream=True, max_tokens=9))
        await eventually(lambda: gateway.pool.links[0].num_tokens > 0)
        await target.lifecycle.drain()
        await eventually(lambda: not gateway.pool.is_serving)
        target.release.set()
        assert events((await request).content)[-1] == "[DONE]"


async def test_a_target_that_was_never_there_is_named(
    make_gateway: MakeGateway, sha256: str
) -> None:
    nobody = FakeTarget(sha256)
    nobody.port = 1
    gateway = await make_gateway(nobody, num_serving=0)
    async with http_client(gateway) as client:
        status, _, code, message = await error_of(await post(client))
        assert (status, code) == (503, "no_target")
        assert "127.0.0.1:1" in message
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/v1/models")).json()["data"] == []


async def test_a_draining_gateway_refuses_and_reports_it(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target)
    await gateway.lifecycle.drain()
    async with http_client(gateway) as client:
        assert (await client.get("/health")).status_code == 503
        assert (await error_of(await post(client)))[::2] == (503, "server_draining")


async def test_metrics_count_requests_and_tokens(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target)
    async with http_client(gateway) as client:
        await post(client, n=2)
        await post(client, temperature=9)
        text = (await client.get("/metrics")).text
    wanted = (
        'outrider_gateway_requests_total{endpoint="chat_completions",outcome="finished"} 1.0',
        'outrider_gateway_tokens_total{kind="output"} 6.0',
        'outrider_gateway_tokens_total{kind="accepted_draft"} 4.0',
        f'outrider_gateway_target_serving{{target="{target.address}"}} 1.0',
        f'outrider_gateway_target_tokens_total{{target="{target.address}"}} 6.0',
        "outrider_gateway_time_to_first_token_seconds_count 1.0",
    )
    for line in wanted:
        assert line in text


async def test_probes_of_load_balancers_are_answered(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target, quotas=Quotas(keys_from_texts(["a:b"], KeyLimits())))
    async with http_client(gateway) as client:
        for path in ("/health", "/ready", "/ping"):
            assert (await client.get(path)).json()["status"] == "serving"
            probed = await client.head(path)
            assert (probed.status_code, probed.content) == (200, b"")
        headers = {"authorization": "Bearer b"}
        listed = await client.get("/v1/models/", headers=headers)
        assert listed.json() == (await client.get("/v1/models", headers=headers)).json()
