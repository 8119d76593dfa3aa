"""Asks services whether they are ready; a service that does not answer is not ready."""

from __future__ import annotations

import asyncio
import http.client
import ssl

import grpc
from grpc import aio

from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.pb.outrider.target.v1 import target_service_pb2, target_service_pb2_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from shared.rpc.healthcheck import health_problem
from shared.tls import ClientTls

_TIMEOUT_S = 2.0
_WARM_UP_TOKENS = 16
_WARM_UP_TIMEOUT_S = 60.0


async def grpc_is_serving(address: str, tls: ClientTls | None = None) -> bool:
    """Returns whether the server at `host:port` reports SERVING for itself as a whole."""
    return await health_problem(address, timeout_s=_TIMEOUT_S, tls=tls) is None


async def has_attachments(
    maintenance_address: str, count: int, tls: ClientTls | None = None
) -> bool:
    """Returns whether at least `count` drafts are attached to the target with this maintenance
    port, and no draft is warming up."""
    async with open_channel(maintenance_address, tls) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        request = admin_service_pb2.ListAttachmentsRequest()
        try:
            answer = await stub.ListAttachments(request, timeout=_TIMEOUT_S)
        except aio.AioRpcError:
            return False
    is_warm = not any(attachment.warming for attachment in answer.attachments)
    return is_warm and len(answer.attachments) >= count


async def http_is_ready(
    host: str,
    port: int,
    path: str,
    tls: ssl.SSLContext | None = None,
    *,
    asks_clients: bool = False,
) -> bool:
    """Returns whether `GET path` answers 200.

    Args:
        asks_clients: the server accepts only clients with a certificate, which the launcher may not
            have. A connection that is closed after the TLS handshake, in which the server has shown
            its own certificate, then counts as an answer.
    """
    return await asyncio.to_thread(_get_is_ok, host, port, path, tls, asks_clients)


async def has_generated(address: str, tls: ClientTls | None = None) -> bool:
    """Has the target generate a few tokens, so that one-time work is done before the first request.
    The target checks no API keys.

    Returns whether the target answered; an error status other than UNAVAILABLE is an answer.
    """
    request = target_service_pb2.GenerateRequest(
        prompt_token_ids=[0] * _WARM_UP_TOKENS,
        sampling_params=sampling_pb2.SamplingParams(temperature=0.0),
        stop_params=sampling_pb2.StopParams(
            max_output_token_count=_WARM_UP_TOKENS, ignore_eos=True
        ),
    )
    async with open_channel(address, tls) as channel:
        stub = target_service_pb2_grpc.TargetServiceStub(channel)
        try:
            async for _ in stub.Generate(request, timeout=_WARM_UP_TIMEOUT_S):
                pass
        except aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE  # slow is not broken
    return True


def _get_is_ok(
    host: str, port: int, path: str, tls: ssl.SSLContext | None, asks_clients: bool
) -> bool:
    if tls is None:
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=tls)
    is_connected = False
    try:
        connection.connect()
        is_connected = True
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException):
        return is_connected and asks_clients
    finally:
        connection.close()
