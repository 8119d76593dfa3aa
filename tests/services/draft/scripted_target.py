"""A real SpeculationService server whose side of the conversation the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from shared.errors import OutriderError
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.speculation.v1 import speculation_service_pb2_grpc as pb_grpc
from shared.rpc.columns import TreeLimits, candidates_from_message
from shared.rpc.server import Lifecycle, bind, create_server
from shared.tokens import Candidate

WAIT_S = 60.0


class Conversation:
    """One attached stream: what the draft said, and what it is told."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[pb.SpeculateRequest | None] = asyncio.Queue()
        self._told: asyncio.Queue[pb.SpeculateResponse | None] = asyncio.Queue()

    def tell(self, **message: Any) -> None:
        """Sends one message, for example `tell(closed=...)`."""
        self._told.put_nowait(pb.SpeculateResponse(**message))

    def end(self) -> None:
        """Ends the stream from the target's side."""
        self._told.put_nowait(None)

    async def hear(self) -> pb.SpeculateRequest | None:
        """Returns the draft's next message; None when it has ended its side."""
        return await asyncio.wait_for(self._heard.get(), WAIT_S)

    async def hear_candidates(self) -> list[Candidate]:
        message = await self.hear()
        assert message is not None
        assert message.WhichOneof("message") == "candidates", message
        return list(candidates_from_message(message.candidates, TreeLimits(256, 1 << 31, 256)))

    async def listen(self, requests: AsyncIterator[pb.SpeculateRequest]) -> None:
        async for request in requests:
            self._heard.put_nowait(request)
        self._heard.put_nowait(None)

    async def told(self) -> pb.SpeculateResponse | None:
        return await self._told.get()


class ScriptedTarget(pb_grpc.SpeculationServiceServicer):
    """Attaches every draft, or refuses every one with `refusal`.

    Attributes:
        attached: terms each draft is given.
        attaches: what the drafts sent.
    """

    def __init__(self, attached: pb.Attached, refusal: OutriderError | None = None) -> None:
        self.attached = attached
        self.refusal = refusal
        self.attaches: asyncio.Queue[pb.Attach] = asyncio.Queue()
        self.port = 0
        self._conversations: asyncio.Queue[Conversation] = asyncio.Queue()
        self._server: aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        lifecycle = Lifecycle([])
        self._server = await create_server(
            [], lambda s: pb_grpc.add_SpeculationServiceServicer_to_server(self, s), lifecycle
        )
        self.port = bind(self._server, f"127.0.0.1:{port}")
        await self._server.start()

    async def stop(self) -> None:
        """Ends every stream at once, as a crash does."""
        if self._server is not None:
            await self._server.stop(0.0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def conversation(self) -> Conversation:
        """Returns the next stream that attaches."""
        return await asyncio.wait_for(self._conversations.get(), WAIT_S)

    async def Speculate(
        self, request_iterator: AsyncIterator[pb.SpeculateRequest], context: Any
    ) -> AsyncIterator[pb.SpeculateResponse]:
        first = await anext(aiter(request_iterator))
        self.attaches.put_nowait(first.attach)
        if self.refusal is not None:
            raise self.refusal
        yield pb.SpeculateResponse(attached=self.attached)
        conversation = Conversation()
        listening = asyncio.create_task(conversation.listen(request_iterator))
        self._conversations.put_nowait(conversation)
        telling = asyncio.create_task(conversation.told())
        try:
            while True:
                await asyncio.wait({telling, listening}, return_when=asyncio.FIRST_COMPLETED)
                if not telling.done():
                    return
                response = telling.result()
                if response is None:
                    return
                yield response
                telling = asyncio.create_task(conversation.told())
        finally:
            telling.cancel()
            listening.cancel()
