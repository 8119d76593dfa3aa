"""A real gRPC server whose methods are plain functions over bytes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from shared.rpc.channel import open_channel
from shared.rpc.server import Lifecycle, bind, create_server
from shared.tls import ClientTls, ServerTls

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    """A started server with a channel to it."""

    server: aio.Server
    channel: aio.Channel
    lifecycle: Lifecycle
    address: str

    def call(self, kind: str, **options: Any) -> Any:
        """Calls the method of this kind with the request `b"?"`."""
        method = getattr(self.channel, kind)(f"/scripted.Service/{kind}")
        return method(iter([b"?"]) if kind.startswith("stream") else b"?", **options)


@contextlib.asynccontextmanager
async def scripted_server(
    server_tls: ServerTls | None = None,
    client_tls: ClientTls | None = None,
    **behaviours: Callable[..., Any],
) -> AsyncIterator[ScriptedServer]:
    """Serves one behaviour per kind of RPC, for example `unary_stream=...`, on a free port."""
    handlers = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(behaviour)
        for kind, behaviour in behaviours.items()
    }
    generic = grpc.method_handlers_generic_handler("scripted.Service", handlers)
    lifecycle = Lifecycle(["scripted.Service"])
    server = await create_server(
        [], lambda server: server.add_generic_rpc_handlers((generic,)), lifecycle
    )
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', server_tls)}"
    await server.start()
    async with open_channel(address, client_tls) as channel:
        try:
            yield ScriptedServer(server, channel, lifecycle, address)
        finally:
            await server.stop(None)
