"""The least a gateway can cost: `python -m tests.load.bare_gateway`.

Relays a synthetic target's steps as chunks that never change: one gRPC stream in, one HTTP response
a request out, the same server and libraries. No text, no checks, no middleware, no metrics. What
the gateway costs above this is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
from typing import Any

import orjson
import uvloop
from grpc import aio
from starlette.types import Receive, Scope, Send

from gateway.http_server import HttpServer, listen
from gateway.settings import GatewaySettings
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.rpc.channel import open_channel

_HEAD = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1795232092,"model":"synthetic","choices":[{"index":0,"delta":{"content":" some '
    b'text"},"logprobs":null,"finish_reason":null'
)
_CHUNK = _HEAD + b"}]}\n\n"
_START = {"type": "http.response.start", "status": 200, "headers": []}


class BareGateway:
    """An ASGI application in front of one target."""

    def __init__(self, channel: aio.Channel) -> None:
        stub = pb_grpc.TargetServiceStub(channel)
        # The stubs of grpc do not know that a stream may be written to by hand.
        self._call: Any = stub.Session(wait_for_ready=True)  # type: ignore[call-arg]
        self._writing = asyncio.Lock()
        self._ids = itertools.count(1)
        self._steps: dict[int, asyncio.Queue[list[int] | None]] = {}

    async def relay(self) -> None:
        """Wakes the requests that a message is about."""
        async for message in self._call:
            deltas, start = message.deltas, 0
            token_ids = deltas.token_ids[:]
            for key, count in zip(deltas.request_ids[:], deltas.token_counts[:], strict=True):
                self._steps[key].put_nowait(token_ids[start : start + count])
                start += count
            for event in message.events:
                if event.response.HasField("finished"):
                    self._steps[event.request_id].put_nowait(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        if scope["method"] == "POST":
            body = await _body(receive)
        await send(_START)
        if body:
            await self._stream(orjson.loads(body), send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, body: dict[str, Any], send: Send) -> None:
        request_id = next(self._ids)
        steps = self._steps[request_id] = asyncio.Queue()
        request = pb.GenerateRequest()
        request.stop_params.max_output_token_count = body["max_tokens"]
        submit = pb.Submit(request_id=request_id, request=request)
        async with self._writing:  # a stream takes one message at a time
            await self._call.write(pb.SessionRequest(submit=submit))
        while (token_ids := await steps.get()) is not None:
            chunk = _chunk_with_ids(token_ids) if body["return_token_ids"] else _CHUNK
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        del self._steps[request_id]


def _chunk_with_ids(token_ids: list[int]) -> bytes:
    return _HEAD + b',"token_ids":' + orjson.dumps(token_ids) + b"}]}\n\n"


async def _body(receive: Receive) -> bytes:
    body, is_more = b"", True
    while is_more:
        message = await receive()
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
    return body


async def _serve(flags: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_channel(flags.target) as channel:
        app = BareGateway(channel)
        relay = asyncio.create_task(app.relay())
        http = HttpServer(app, listen("127.0.0.1", flags.port), GatewaySettings())
        http.start()
        await http.run_until(stop)
        await http.stop(1)
        relay.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(prog="bare-gateway", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--target", required=True, help="host:port of a synthetic target")
    uvloop.run(_serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
