"""The gateway's maintenance port: AdminService, health, reflection."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from grpc import aio

from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.rpc.admin_service import AdminHooks, AdminServicer, ProcessInfo
from shared.rpc.channel import open_channel
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.server import create_server

_MAX_RECEIVE_BYTES = 64 * 1024  # its requests are a few numbers
_CALL_S = 5.0
_ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]


async def maintenance_server(
    info: ProcessInfo, lifecycle: Lifecycle, hooks: AdminHooks
) -> aio.Server:
    """Returns the server, neither bound nor started."""

    def register(server: aio.Server) -> None:
        servicer = AdminServicer(info, lifecycle, hooks)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)

    return await create_server([_ADMIN], register, lifecycle, max_receive_bytes=_MAX_RECEIVE_BYTES)


async def drain_all(addresses: Sequence[str], grace_s: float) -> int:
    """Drains the workers with these maintenance addresses; returns what still runs."""
    request = admin_service_pb2.DrainServerRequest()
    request.grace_duration.FromNanoseconds(round(grace_s * 1e9))

    async def drain(address: str) -> int:
        async with open_channel(address) as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            answer = await stub.DrainServer(request, timeout=grace_s + _CALL_S)
        return int(answer.running_request_count)

    return sum(await asyncio.gather(*map(drain, addresses)))


async def summed_gauges(addresses: Sequence[str]) -> Mapping[str, float]:
    """Returns the sums over the workers, and how many of those answer."""
    total: Counter[str] = Counter(worker_count=0)
    for address in addresses:
        with suppress(aio.AioRpcError):
            async with open_channel(address) as channel:
                stub = admin_service_pb2_grpc.AdminServiceStub(channel)
                request = admin_service_pb2.GetServerInfoRequest()
                found = await stub.GetServerInfo(request, timeout=_CALL_S)
            total.update({"worker_count": 1, **found.gauges})
    return total
