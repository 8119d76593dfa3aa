"""The request that warms a stack up before it says that it is ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import grpc
import pytest
from grpc import aio

from services.probe import has_generated
from services.serve import parts
from services.serve_plan import make_plan
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
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


class _KeyedGateway(BaseHTTPRequestHandler):
    """Says that it is ready, and wants a key for everything else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 401)
        self.end_headers()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, template: str, *arguments: object) -> None:
        """Says nothing."""


async def test_a_stack_whose_gateway_wants_a_key_is_warmed_up(tmp_path: Path) -> None:
    target = _Target()
    with HTTPServer(("127.0.0.1", 0), _KeyedGateway) as gateway:
        Thread(target=gateway.serve_forever, daemon=True).start()
        async with _serving(target) as port:
            flags = [f"--port={gateway.server_port}", f"--target-port={port}", "--api-key=secret"]
            plan = make_plan([*flags, f"--log-dir={tmp_path}"], {}, 0)
            assert await parts(plan)[-1].is_ready()
        gateway.shutdown()
    assert len(target.asked) == 1
