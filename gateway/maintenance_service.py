"""The gateway's maintenance port: AdminService, health, reflection."""

from __future__ import annotations

from grpc import aio

from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.rpc.admin_service import AdminHooks, AdminServicer, ProcessInfo
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.server import create_server

_MAX_RECEIVE_BYTES = 64 * 1024  # its requests are a few numbers
_ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]


async def maintenance_server(
    info: ProcessInfo, lifecycle: Lifecycle, hooks: AdminHooks
) -> aio.Server:
    """Returns the server, neither bound nor started."""

    def register(server: aio.Server) -> None:
        servicer = AdminServicer(info, lifecycle, hooks)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)

    return await create_server([_ADMIN], register, lifecycle, max_receive_bytes=_MAX_RECEIVE_BYTES)
