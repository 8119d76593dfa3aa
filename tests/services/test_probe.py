"""The request that warms a stack up before it says that it is ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from grpc import aio
from starlette.types import Receive, Scope, Send

from gateway.http_server import HttpServer, listen
from gateway.settings import GatewaySettings
from services.probe import has_generated
from services.serve import parts
from services.serve_plan import make_plan
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.tls import CertFolder, ServerTls
from tests.helpers.serving import free_ports


@dataclass
class _Target(pb_grpc.TargetServiceServicer):
    """Answers with a status, and notes what it was asked."""

    status: grpc.StatusCode = grpc.StatusCode.OK
    asked: list[pb.GenerateRequest] = field(default_factory=list)

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.asked.append(request)
        yield pb.GenerateResponse(started=pb.GenerationStarted())
        if self.status is not grpc.StatusCode.OK:
            await context.abort(self.status, "no")


@asynccontextmanager
async def _serving(target: _Target) -> AsyncIterator[int]:
    server = aio.server()
    pb_grpc.add_TargetServiceServicer_to_server(target, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0.0)


@pytest.mark.parametrize(
    "status", [grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL]
)
async def test_a_few_tokens_are_generated_whatever_the_answer(status: grpc.StatusCode) -> None:
    target = _Target(status)
    async with _serving(target) as port:
        assert await has_generated(f"127.0.0.1:{port}")
    [request] = target.asked
    assert request.prompt_token_ids
    assert request.stop_params.max_output_token_count > 4, "some rounds with a draft"


async def test_nobody_there_has_not_generated() -> None:
    assert not await has_generated(f"127.0.0.1:{next(free_ports(1))}")


async def _keyed_gateway(scope: Scope, receive: Receive, send: Send) -> None:
    """Says that it is ready, and wants a key for everything else."""
    status = 200 if (scope["method"], scope["path"]) == ("GET", "/ready") else 401
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _is_warm(target: _Target, *flags: str, tls: ServerTls | None = None) -> bool:
    """Returns what the stack of a launch line says of its gateway, which serves with `tls`."""
    settings = GatewaySettings()
    if tls is not None:
        settings = GatewaySettings(tls_cert=tls.cert, tls_key=tls.key, http_client_ca=tls.client_ca)
    gateway = HttpServer(_keyed_gateway, listen("127.0.0.1", 0), settings)
    gateway.start()
    try:
        async with _serving(target) as port:
            ports = [f"--port={gateway.port}", f"--target-port={port}"]
            return await parts(make_plan([*ports, *flags], {}, 0))[-1].is_ready()
    finally:
        await gateway.stop(1)


async def test_a_stack_whose_gateway_wants_a_key_is_warmed_up() -> None:
    target = _Target()
    assert await _is_warm(target, "--api-key=secret")
    assert len(target.asked) == 1


@pytest.mark.parametrize("asks_clients", [False, True])
async def test_a_gateway_with_tls_before_a_target_without_is_warmed_up(
    certs: CertFolder, other_certs: CertFolder, asks_clients: bool
) -> None:
    """Also where its clients need a certificate, and the launcher has none."""
    tls = certs.server_tls(asks_clients=asks_clients)
    flags = [f"--gateway-tls-cert={tls.cert}", f"--gateway-tls-key={tls.key}"]
    flags += [f"--http-client-ca={tls.client_ca}"] * asks_clients
    target = _Target()
    assert await _is_warm(target, *flags, tls=tls)
    assert len(target.asked) == 1
    assert not await _is_warm(target, *flags, tls=other_certs.server_tls(asks_clients=False))
    assert not await _is_warm(target, *flags)
