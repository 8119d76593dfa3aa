"""Asks services whether they are ready; one that does not answer is not."""

from __future__ import annotations

import asyncio
import http.client

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.rpc.channel import open_channel

_TIMEOUT_S = 2.0


async def grpc_is_serving(address: str) -> bool:
    """Returns whether the server at `host:port` reports SERVING for itself as a whole."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def has_attachment(maintenance_address: str) -> bool:
    """Returns whether a draft is attached to the target with this maintenance `host:port`."""
    async with open_channel(maintenance_address) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        request = admin_service_pb2.ListAttachmentsRequest()
        try:
            answer = await stub.ListAttachments(request, timeout=_TIMEOUT_S)
        except aio.AioRpcError:
            return False
    return len(answer.attachments) > 0


async def http_is_ready(host: str, port: int, path: str) -> bool:
    """Returns whether `GET path` answers 200."""
    return await asyncio.to_thread(_get_is_ok, host, port, path)


def _get_is_ok(host: str, port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
