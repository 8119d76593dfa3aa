"""What operators are told and can ask for, on a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from shared.errors import InvalidArgument
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as pb_grpc
from shared.rpc.admin_service import AdminHooks, AdminServicer, ProcessInfo
from shared.rpc.channel import open_channel
from shared.rpc.server import Lifecycle, State, bind, create_server
from shared.rpc.status import error_from_rpc

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]
INFO = ProcessInfo("target", "1.2.3", 1_700_000_000.5, {"port": "50051"})


async def nothing_runs(grace_s: float) -> int:
    return 0


@contextlib.asynccontextmanager
async def admin(
    hooks: AdminHooks, lifecycle: Lifecycle
) -> AsyncIterator[pb_grpc.AdminServiceAsyncStub]:
    servicer = AdminServicer(INFO, lifecycle, hooks)
    server = await create_server(
        [SERVICE], lambda s: pb_grpc.add_AdminServiceServicer_to_server(servicer, s), lifecycle
    )
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.AdminServiceStub(channel)
    await server.stop(None)


async def test_info_names_build_state_settings_and_gauges() -> None:
    async def gauges() -> Mapping[str, float]:
        return {"free_page_count": 12.0}

    lifecycle = Lifecycle([])
    async with admin(AdminHooks(nothing_runs, gauges=gauges), lifecycle) as stub:
        starting = await stub.GetServerInfo(pb.GetServerInfoRequest())
        await lifecycle.activate()
        active = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (active.service, active.version) == ("target", "1.2.3")
    assert active.start_time.ToMilliseconds() == 1_700_000_000_500
    assert dict(active.settings) == {"port": "50051"}
    assert dict(active.gauges) == {"free_page_count": 12.0}
    assert starting.state == pb.GetServerInfoResponse.STATE_STARTING
    assert active.state == pb.GetServerInfoResponse.STATE_ACTIVE


async def test_what_a_process_does_not_have_is_unimplemented() -> None:
    async with admin(AdminHooks(nothing_runs), Lifecycle([])) as stub:
        for call in (
            stub.ListAttachments(pb.ListAttachmentsRequest()),
            stub.FlushPrefixCache(pb.FlushPrefixCacheRequest()),
        ):
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_attachments_and_flush_come_from_the_process() -> None:
    async def attachments() -> Sequence[pb.Attachment]:
        return [pb.Attachment(attachment_id="a-1"), pb.Attachment(attachment_id="a-2")]

    async def flush() -> int:
        return 5

    hooks = AdminHooks(nothing_runs, attachments=attachments, flush_prefix_cache=flush)
    async with admin(hooks, Lifecycle([])) as stub:
        listed = await stub.ListAttachments(pb.ListAttachmentsRequest())
        flushed = await stub.FlushPrefixCache(pb.FlushPrefixCacheRequest())
    assert [each.attachment_id for each in listed.attachments] == ["a-1", "a-2"]
    assert flushed.freed_page_count == 5


@pytest.mark.parametrize(
    ("request_message", "grace_s"),
    [
        (pb.DrainServerRequest(), 30.0),
        (pb.DrainServerRequest(grace_duration=Duration(nanos=500_000_000)), 0.5),
        (pb.DrainServerRequest(grace_duration=Duration()), 0.0),
    ],
)
async def test_drain_passes_the_grace_and_tells_what_still_runs(
    request_message: pb.DrainServerRequest, grace_s: float
) -> None:
    lifecycle = Lifecycle([])
    given: list[tuple[float, State]] = []

    async def drain(grace_s: float) -> int:
        given.append((grace_s, lifecycle.state))
        return 2

    async with admin(AdminHooks(drain), lifecycle) as stub:
        response = await stub.DrainServer(request_message)
    assert response.running_request_count == 2
    assert given == [(grace_s, State.DRAINING)]


async def test_negative_grace_is_refused_before_anything_drains() -> None:
    lifecycle = Lifecycle([])
    request = pb.DrainServerRequest()
    request.grace_duration.FromTimedelta(timedelta(seconds=-1))
    async with admin(AdminHooks(nothing_runs), lifecycle) as stub:
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.DrainServer(request)
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidArgument)
    assert error.violations[0].field == "grace_duration"
    assert lifecycle.state is State.STARTING


async def test_drain_goes_on_when_its_caller_hangs_up() -> None:
    entered, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def drain(grace_s: float) -> int:
        entered.set()
        await may_end.wait()
        ended.set()
        return 0

    async with admin(AdminHooks(drain), Lifecycle([])) as stub:
        call = stub.DrainServer(pb.DrainServerRequest())
        await entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        may_end.set()
        await asyncio.wait_for(ended.wait(), 60)
