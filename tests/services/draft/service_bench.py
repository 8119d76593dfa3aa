"""`DraftService` of any drafter over a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from services.draft.draft_service import DraftBackend, DraftServicer
from services.draft.engine import DraftEngine
from services.draft.events import LinkStatus, WorkerIdentity
from shared.errors import OutriderError
from shared.pb.outrider.draft.v1 import draft_service_pb2_grpc as pb_grpc
from shared.rpc.channel import open_channel
from shared.rpc.server import Lifecycle, bind, create_server
from shared.rpc.status import error_from_rpc
from shared.tokens import TreeShape

IDENTITY = WorkerIdentity("worker", "ngram", "NGRAM", None, 4, None)
LINKS = (LinkStatus("a:1", "attachment-1"), LinkStatus("b:2", None, "UNAVAILABLE: gone"))


class Bench:
    """A server around a drafter, and a stub to call it."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.engine = DraftEngine(drafter, TreeShape(3, 1, 4), chunk_tokens=64, max_sequences=4)
        self.lifecycle = Lifecycle([])
        self.servicer = DraftServicer(self.lifecycle)
        self.stub: Any = None

    async def start(self) -> aio.Server:
        self.engine.start()
        server = await create_server(
            [],
            lambda s: pb_grpc.add_DraftServiceServicer_to_server(self.servicer, s),
            self.lifecycle,
        )
        port = bind(server, "127.0.0.1:0")
        await server.start()
        self.channel = open_channel(f"127.0.0.1:{port}")
        self.stub = pb_grpc.DraftServiceStub(self.channel)
        return server

    async def load(self) -> None:
        self.servicer.load(DraftBackend(self.engine, IDENTITY, self.drafter.limits, lambda: LINKS))
        await self.lifecycle.activate()

    async def refusal(self, method: str, request: Any) -> OutriderError:
        """Returns the error the call ends with."""
        with pytest.raises(aio.AioRpcError) as caught:
            await getattr(self.stub, method)(request)
        return error_from_rpc(caught.value)


@asynccontextmanager
async def served(bench: Bench) -> AsyncIterator[Bench]:
    """Serves a loaded bench."""
    server = await bench.start()
    await bench.load()
    try:
        yield bench
    finally:
        await bench.channel.close()
        await server.stop(0.0)
        bench.engine.stop()
