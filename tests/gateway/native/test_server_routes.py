"""Model and server information, flushing, aborting."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import pytest_asyncio

from gateway.app import Gateway
from gateway.metrics import kv_usage_exposition
from gateway.pool import TargetPool
from gateway.process import maintenance_server
from gateway.settings import GatewaySettings
from shared.rpc.admin_client import TargetStatus
from shared.rpc.admin_service import AdminHooks, ProcessInfo
from shared.rpc.server import Lifecycle, bind
from tests.gateway.driving import CHAT, MakeGateway, error_of, events, eventually, http_client
from tests.helpers.fake_target import FakeTarget


async def _drain(grace_s: float) -> int:
    return 0


async def _flush() -> int:
    return 7


@asynccontextmanager
async def _maintenance(hooks: AdminHooks) -> AsyncIterator[str]:
    server = await maintenance_server(ProcessInfo("process", "0", 1.0, {}), Lifecycle([]), hooks)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest_asyncio.fixture
async def maintenance() -> AsyncIterator[str]:
    """The maintenance port of a target that frees seven pages."""
    async with _maintenance(AdminHooks(drain=_drain, flush_prefix_cache=_flush)) as address:
        yield address


async def test_the_model_is_described_without_paths(client: httpx.AsyncClient, sha256: str) -> None:
    for path in ("/get_model_info", "/model_info"):
        assert (await client.get(path)).json() == {
            "model_path": "fake",
            "tokenizer_path": "fake",
            "is_generation": True,
            "max_model_len": 4096,
            "vocab_size": 512,
            "tokenizer_sha256": sha256,
            "weight_version": "",
        }
    response = await client.get("/get_model_info", params={"model": "other"})
    assert (await error_of(response))[0] == 404


async def test_the_server_tells_its_targets_and_its_mean_accepted_length(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    before = (await client.get("/server_info")).json()
    assert before["internal_states"] == [{"avg_spec_accept_length": None}]
    await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 9, "ignore_eos": True})
    after = (await client.get("/get_server_info")).json()
    # Nine tokens in three rounds.
    assert after["internal_states"] == [{"avg_spec_accept_length": 3.0}]
    assert after["targets"][0]["address"] == target.address
    assert after["targets"][0]["state"] == "serving"
    assert after["targets"][0]["received_token_count"] == 9
    assert (after["models"], after["open_request_count"]) == (["fake"], 0)


async def test_load_and_tokenizer_are_told(client: httpx.AsyncClient, target: FakeTarget) -> None:
    assert (await client.get("/load")).json() == {"server_load": 0}
    (load,) = (await client.get("/v1/loads")).json()["loads"]
    assert load == {
        "address": target.address, "num_running_reqs": 0, "num_reserved_tokens": 0,
    }  # fmt: skip
    info = (await client.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|end|>"  # of tokenizer_config.json
    assert info["special_tokens"]["0"] == "<|end|>"
    assert "add_generation_prompt" in info["chat_template"]


async def test_one_token_shows_that_it_generates(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    assert (await client.get("/health_generate")).json() == {"status": "generating"}
    assert target.submits[0].request.stop_params.max_output_token_count == 1


def _maintained(gateway: Gateway, address: str) -> Gateway:
    settings = dataclasses.replace(gateway.settings, target_maintenance=(address,))
    return dataclasses.replace(gateway, settings=settings)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flushing_reaches_the_targets_maintenance_port(
    gateway: Gateway, maintenance: str, method: str
) -> None:
    able = _maintained(gateway, maintenance)
    async with http_client(able) as client:
        response = await client.request(method, "/flush_cache")
    assert response.json() == {"success": True, "freed_page_count": {maintenance: 7}}


async def test_flushing_without_a_maintenance_port_names_the_setting(
    client: httpx.AsyncClient,
) -> None:
    status, _, code, message = await error_of(await client.post("/flush_cache"))
    assert (status, code) == (501, "target_maintenance_unset")
    assert "target_maintenance" in message


async def test_flushing_a_port_that_is_no_targets_names_it(
    gateway: Gateway, target: FakeTarget
) -> None:
    async with _maintenance(AdminHooks(drain=_drain)) as drafts:
        for address, reason in ((target.address, "unimplemented"), (drafts, "prefix_cache_absent")):
            wrong = _maintained(gateway, address)
            async with http_client(wrong) as client:
                status, _, code, message = await error_of(await client.post("/flush_cache"))
            assert (status, code) == (501, reason)
            assert message.startswith(f"{address} is not the maintenance port of a target")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_aborted_request_ends_with_an_error_and_stops_on_the_target(
    client: httpx.AsyncClient, gateway: Gateway, target: FakeTarget, is_stream: bool
) -> None:
    target.hold_after = 1
    body = {**CHAT, "stream": is_stream, "max_tokens": 50}
    request = asyncio.create_task(
        client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
    )
    await eventually(lambda: gateway.pool.links[0].num_tokens > 0)
    assert (await client.post("/abort_request", json={"rid": "not-mine"})).json() == {
        "aborted_request_count": 0
    }
    assert (await client.post("/abort_request", json={"rid": "mine"})).json() == {
        "aborted_request_count": 1
    }
    response = await request
    await target.until(lambda: len(target.cancelled) == 1)
    if is_stream:
        assert response.status_code == 200
        assert events(response.content)[-1]["error"]["code"] == "request_aborted"
    else:
        assert (await error_of(response))[::2] == (410, "request_aborted")
    assert gateway.lifecycle.num_open == 0
    assert b'outcome="aborted"' in (await client.get("/metrics")).content


async def test_all_requests_can_be_aborted_at_once(
    client: httpx.AsyncClient, gateway: Gateway, target: FakeTarget
) -> None:
    target.is_mute = True
    requests = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in "ab"]
    await target.until(lambda: len(target.submits) == 2)
    answer = await client.post("/abort_request", json={"abort_all": True})
    assert answer.json() == {"aborted_request_count": 2}
    assert [(await request).status_code for request in requests] == [410, 410]
    assert gateway.pool.num_live == 0


async def test_an_abort_of_nothing_is_refused_by_name(client: httpx.AsyncClient) -> None:
    response = await client.post("/abort_request", json={})
    assert (await error_of(response))[:3] == (400, "rid", "rid_missing")


async def test_the_key_guards_every_interface_but_probes(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target, api_key="sesame")
    async with http_client(gateway) as client:
        for path in ("/abort_request", "/flush_cache", "/tokenize", "/generate", "/v1/messages"):
            assert (await client.post(path, json={})).status_code == 401
        for path in ("/server_info", "/get_model_info"):
            assert (await client.get(path)).status_code == 401
            headers = {"x-api-key": "sesame"}
            assert (await client.get(path, headers=headers)).status_code == 200
        for path in ("/health", "/metrics", "/version", "/ready"):
            assert (await client.get(path)).status_code == 200


async def test_every_route_is_described(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    assert {"/generate", "/tokenize", "/v1/messages", "/v1/responses"} <= set(document["paths"])


def test_the_share_of_kv_tokens_held_has_vllms_name() -> None:
    status = TargetStatus("", 0, None, (), 1, 1, 0, 1, 400, 100, False)
    pool = TargetPool(GatewaySettings(target=("127.0.0.1:1",)), "x")
    assert kv_usage_exposition(pool, []) == b""
    lines = kv_usage_exposition(
        pool, [status, dataclasses.replace(status, num_used_tokens=300)]
    ).decode()
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name=""} 0.5' in lines
