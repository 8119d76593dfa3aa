"""Asks a process's maintenance port."""

from __future__ import annotations

from grpc import aio

from shared.errors import Unimplemented
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as pb_grpc
from shared.rpc.channel import open_channel
from shared.rpc.status import error_from_rpc
from shared.tls import ClientTls


async def flush_prefix_cache(address: str, timeout_s: float, tls: ClientTls | None = None) -> int:
    """Drops the unused prefix-cache pages of a target; returns how many.

    Args:
        address: `host:port` of its maintenance port.

    Raises:
        Unimplemented: the address is not a target's maintenance port.
        OutriderError: it did not; in the words of the call's status.
    """
    async with open_channel(address, tls) as channel:
        stub = pb_grpc.AdminServiceStub(channel)
        try:
            answer = await stub.FlushPrefixCache(pb.FlushPrefixCacheRequest(), timeout=timeout_s)
        except aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            if isinstance(error, Unimplemented):
                message = f"{address} is not the maintenance port of a target: {error.message}"
                error = Unimplemented(message, reason=error.reason)
            raise error from failure
    return answer.freed_page_count
