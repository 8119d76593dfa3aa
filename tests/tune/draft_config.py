"""Sets the tree shape of a running draft."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from grpc import aio

from shared.pb.outrider.draft.v1 import draft_service_pb2 as pb
from shared.pb.outrider.draft.v1 import draft_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import token_tree_pb2
from tests.tune.search import Shape

_START_TIMEOUT_S = 60.0


class DraftConfig:
    """The draft's `DraftService`; leaving the context restores the shape that was found."""

    def __init__(self, channel: aio.Channel) -> None:
        self._stub = pb_grpc.DraftServiceStub(channel)
        self._found: pb.DraftConfig | None = None

    async def __aenter__(self) -> Self:
        info = await self._stub.GetDraftInfo(pb.GetDraftInfoRequest(), timeout=_START_TIMEOUT_S)
        self._found = info.config
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._found is not None:
            request = pb.UpdateDraftConfigRequest(config=self._found)
            # Also when the search is broken off.
            await asyncio.shield(self._stub.UpdateDraftConfig(request))

    @property
    def shape(self) -> Shape:
        """The shape that was found."""
        assert self._found is not None, "entered first"
        shape = self._found.shape
        return Shape(shape.step_count, shape.topk, shape.draft_token_count)

    async def unpin(self) -> None:
        """Lets the target choose shapes."""
        assert self._found is not None, "entered first"
        config = pb.DraftConfig(shape=self._found.shape, pinned=False)
        await self._stub.UpdateDraftConfig(pb.UpdateDraftConfigRequest(config=config))

    async def set(self, shape: Shape) -> None:
        """Pins every tree to a shape.

        Raises:
        AioRpcError: the draft refuses the shape.
        """
        message = token_tree_pb2.TreeShape(
            step_count=shape.steps, topk=shape.topk, draft_token_count=shape.tokens
        )
        config = pb.DraftConfig(shape=message)
        await self._stub.UpdateDraftConfig(pb.UpdateDraftConfigRequest(config=config))
