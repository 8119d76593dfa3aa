"""Servers: health that follows the process, names from descriptors, ports that are not shared.

Errors become statuses once; ids reach the logs; aborts and cancellations pass."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from shared.errors import InvalidArgument, QueueFull, SettingsError, Unavailable
from shared.pb.outrider.draft.v1 import draft_service_pb2, draft_service_pb2_grpc
from shared.rpc.channel import open_channel
from shared.rpc.server import Lifecycle, bind, create_server
from shared.rpc.status import error_from_rpc
from shared.telemetry.tracing import NO_REQUEST, current_request_id, current_traceparent
from tests.helpers.scripted_server import KINDS, ScriptedServer, scripted_server

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


def behaviour(kind: str, act: Any) -> Any:
    """Returns a handler that awaits `act(context)`; a stream yields one response before it.

    Requests are read to their end first: a client of grpcio that is still writing when the call
    ends may lose the status (grpc issue 36066).
    """

    async def unary(request: Any, context: Any) -> bytes:
        await read_all(request)
        return await act(context) or b"!"

    async def stream(request: Any, context: Any) -> Any:
        await read_all(request)
        yield b"first"
        await act(context)

    async def read_all(request: Any) -> None:
        if kind.startswith("stream"):
            assert [each async for each in request] == [b"?"]

    return stream if kind.endswith("stream") else unary


def our_errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without what grpcio logs of the event loops of earlier tests."""
    records = (each for each in caplog.records if each.name.startswith("shared."))
    return [each for each in records if each.levelno >= logging.ERROR]


async def failure_of(serving: ScriptedServer, kind: str, **options: Any) -> aio.AioRpcError:
    call = serving.call(kind, **options)
    is_stream = kind.endswith("stream")
    if is_stream:
        assert await call.read() == b"first"
    with pytest.raises(aio.AioRpcError) as caught:
        await (call.read() if is_stream else call)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_error_arrives_as_rich_status_from_every_kind_of_call(kind: str) -> None:
    async def act(context: Any) -> None:
        raise QueueFull.of(7, 4, retry_after_s=2.5)

    async with scripted_server(**{kind: behaviour(kind, act)}) as serving:
        failure = await failure_of(serving, kind, metadata=[("x-request-id", "r-1")])
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = error_from_rpc(failure)
    assert isinstance(error, QueueFull)
    assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 2.5)
    assert error.message == "7 requests are waiting; the queue holds 4"
    assert ("x-request-id", "r-1") in list(failure.trailing_metadata())


async def test_details_are_what_the_official_reader_reads() -> None:
    async def act(context: Any) -> None:
        raise InvalidArgument.prompt_too_long(9000, 8192)

    async with scripted_server(unary_unary=behaviour("unary_unary", act)) as serving:
        failure = await failure_of(serving, "unary_unary", metadata=[("x-request-id", "r-1")])
    status = rpc_status.from_call(failure)  # refuses a code or message unlike the call's
    info, request, bad = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.RequestInfo(),
        error_details_pb2.BadRequest(),
    )
    for detail, message in zip(status.details, (info, request, bad), strict=True):
        assert detail.Unpack(message)
    assert (info.reason, info.domain) == ("PROMPT_TOO_LONG", "outrider")
    assert request.request_id == "r-1"
    assert [each.field for each in bad.field_violations] == ["prompt"]


@pytest.mark.parametrize("kind", KINDS)
async def test_unknown_exception_tells_the_caller_the_request_id_only(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(context: Any) -> None:
        raise ZeroDivisionError("a secret of ours")

    async with scripted_server(**{kind: behaviour(kind, act)}) as serving:
        failure = await failure_of(serving, kind, metadata=[("x-request-id", "r-2")])
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert error_from_rpc(failure).reason == "ENGINE_FAILED"
    assert "r-2" in (failure.details() or "")
    assert "secret" not in str(failure)
    [record] = our_errors(caplog)
    assert record.exc_info is not None
    assert "a secret of ours" in str(record.exc_info[1])


@pytest.mark.parametrize("kind", KINDS)
async def test_abort_of_the_handler_passes_unchanged(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")

    async with scripted_server(**{kind: behaviour(kind, act)}) as serving:
        failure = await failure_of(serving, kind)
    assert (failure.code(), failure.details()) == (grpc.StatusCode.UNIMPLEMENTED, "not here")
    assert our_errors(caplog) == []


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_stream_may_be_written_by_a_coroutine(kind: str) -> None:
    async def write(request: Any, context: Any) -> None:
        if kind.startswith("stream"):
            assert [each async for each in request] == [b"?"]
        await context.write(b"first")
        raise QueueFull.of(1, 1)

    async with scripted_server(**{kind: write}) as serving:
        failure = await failure_of(serving, kind)
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_generator_yields_all_its_responses(kind: str) -> None:
    async def count(request: Any, context: Any) -> Any:
        for number in range(100):
            yield bytes([number])

    async with scripted_server(**{kind: count}) as serving:
        received = [response async for response in serving.call(kind)]
    assert received == [bytes([number]) for number in range(100)]


async def test_requests_of_a_stream_reach_the_handler() -> None:
    async def echo(requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request + request

    async with scripted_server(stream_stream=echo) as serving:
        assert [response async for response in serving.call("stream_stream")] == [b"??"]


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelled_call_cancels_the_handler_and_is_no_error(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    entered, ended = asyncio.Event(), asyncio.Event()

    async def act(context: Any) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with scripted_server(**{kind: behaviour(kind, act)}) as serving:
        call = serving.call(kind)
        if kind.endswith("stream"):
            assert await call.read() == b"first"
        await entered.wait()
        call.cancel()
        await asyncio.wait_for(ended.wait(), 60)
    assert our_errors(caplog) == []


async def test_generator_is_closed_when_its_caller_leaves_between_responses() -> None:
    closed = asyncio.Event()

    async def endless(request: Any, context: Any) -> Any:
        try:
            while True:
                yield bytes(4096)
        finally:
            closed.set()

    async with scripted_server(unary_stream=endless) as serving:
        call = serving.call("unary_stream")
        await call.read()
        call.cancel()
        await asyncio.wait_for(closed.wait(), 60)


async def test_handler_sees_the_callers_request_id_and_trace() -> None:
    seen: list[Any] = []

    async def act(context: Any) -> None:
        seen.append((current_request_id.get(), current_traceparent.get()))

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    metadata = [("x-request-id", "r-3"), ("traceparent", trace)]
    async with scripted_server(unary_unary=behaviour("unary_unary", act)) as serving:
        await serving.call("unary_unary", metadata=metadata)
    assert seen == [("r-3", trace)]
    assert current_request_id.get() == NO_REQUEST


@pytest.mark.parametrize("metadata", [(), (("x-request-id", "x" * 129),)])
async def test_request_without_a_fit_id_gets_one_of_its_own(metadata: Any) -> None:
    seen: list[str] = []

    async def act(context: Any) -> None:
        seen.append(current_request_id.get())

    async with scripted_server(unary_unary=behaviour("unary_unary", act)) as serving:
        await serving.call("unary_unary", metadata=metadata)
        await serving.call("unary_unary", metadata=metadata)
    assert len(set(seen)) == 2
    assert all(len(each) == 32 for each in seen)


async def test_unknown_method_is_unimplemented() -> None:
    async with scripted_server() as serving:
        failure = await failure_of(serving, "unary_unary")
    assert failure.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error_from_rpc(failure).reason == "UNIMPLEMENTED"
