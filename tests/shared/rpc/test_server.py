"""Servers: health that follows the process, names from descriptors, ports that are not shared."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.errors import SettingsError, Unavailable
from shared.pb.outrider.draft.v1 import draft_service_pb2, draft_service_pb2_grpc
from shared.rpc.channel import open_channel
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.server import bind, create_server
from shared.rpc.status import error_from_rpc
from tests.helpers.scripted_server import scripted_server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


@pytest.mark.parametrize("service", ["", "scripted.Service"])
async def test_health_is_serving_between_activate_and_drain(service: str) -> None:
    async with scripted_server() as serving:
        assert await health(serving.channel, service) == NOT_SERVING
        await serving.lifecycle.activate()
        assert await health(serving.channel, service) == SERVING
        await serving.lifecycle.drain()
        assert await health(serving.channel, service) == NOT_SERVING


async def test_health_of_an_unknown_service_is_not_found() -> None:
    async with scripted_server() as serving:
        with pytest.raises(aio.AioRpcError) as caught:
            await health(serving.channel, "outrider.absent.v1.AbsentService")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watcher_is_told_of_every_change() -> None:
    async with scripted_server() as serving:
        stub = health_pb2_grpc.HealthStub(serving.channel)
        watch: Any = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        await serving.lifecycle.activate()
        assert (await watch.read()).status == SERVING
        await serving.lifecycle.drain()
        assert (await watch.read()).status == NOT_SERVING


async def test_two_servers_of_a_process_share_its_health() -> None:
    lifecycle = Lifecycle(["a.B"])
    servers = [await create_server([], lambda server: None, lifecycle) for _ in range(2)]
    ports = [bind(server, "127.0.0.1:0") for server in servers]
    await lifecycle.activate()
    for server, port in zip(servers, ports, strict=True):
        await server.start()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            assert await health(channel, "a.B") == SERVING
        await server.stop(None)


async def test_new_work_is_taken_until_the_drain() -> None:
    lifecycle = Lifecycle([])
    lifecycle.check_open()
    await lifecycle.activate()
    lifecycle.check_open()
    await lifecycle.drain()
    with pytest.raises(Unavailable, match="draining") as caught:
        lifecycle.check_open()
    assert caught.value.retry_after_s is not None


async def test_port_that_is_taken_is_refused_by_name() -> None:
    async with scripted_server() as serving:
        other = aio.server(options=[("grpc.so_reuseport", 0)])
        with pytest.raises(SettingsError, match=f"cannot listen on {serving.address}: the port"):
            bind(other, serving.address)


async def test_port_is_not_shared_with_a_second_server() -> None:
    async with scripted_server() as first:
        second = await create_server([], lambda server: None, Lifecycle([]))
        with pytest.raises(SettingsError):
            bind(second, first.address)


async def test_reflection_tells_services_and_their_contract() -> None:
    service = draft_service_pb2.DESCRIPTOR.services_by_name["DraftService"]

    def register(server: aio.Server) -> None:
        draft_service_pb2_grpc.add_DraftServiceServicer_to_server(
            draft_service_pb2_grpc.DraftServiceServicer(), server
        )

    server = await create_server([service], register, Lifecycle([service.full_name]))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=service.full_name),
        ]
        listed, file = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    await server.stop(None)
    assert {each.name for each in listed.list_services_response.service} == {
        "outrider.draft.v1.DraftService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    files = file.file_descriptor_response.file_descriptor_proto
    assert any(b"outrider/draft/v1/draft_service.proto" in each for each in files)


async def test_message_of_many_megabytes_passes_both_ways() -> None:
    large = bytes(24 * 1024 * 1024)

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async with scripted_server(unary_unary=echo) as serving:
        method = serving.channel.unary_unary("/scripted.Service/unary_unary")
        assert await method(large) == large


async def test_nobody_listening_is_unavailable() -> None:
    async with scripted_server() as serving:
        address = serving.address
    async with open_channel(address) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await health(channel)
    assert isinstance(error_from_rpc(caught.value), Unavailable)
