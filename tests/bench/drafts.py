"""Sets what a running draft proposes."""

from __future__ import annotations

from dataclasses import dataclass

from shared.pb.outrider.draft.v1 import draft_service_pb2, draft_service_pb2_grpc
from shared.pb.outrider.types.v1 import token_tree_pb2
from shared.rpc.channel import open_channel
from shared.tokens import TreeShape


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What a draft proposes.

    Attributes:
        is_pinned: trees have this shape whatever the target wants.
    """

    shape: TreeShape
    is_pinned: bool


async def set_config(address: str, config: DraftConfig) -> None:
    """Tells the draft at `host:port` what to propose from now on."""
    message = draft_service_pb2.DraftConfig(shape=_message(config.shape), pinned=config.is_pinned)
    async with open_channel(address) as channel:
        stub = draft_service_pb2_grpc.DraftServiceStub(channel)
        await stub.UpdateDraftConfig(
            draft_service_pb2.UpdateDraftConfigRequest(config=message), timeout=10.0
        )


async def live_config(address: str) -> DraftConfig:
    """Returns what the draft at `host:port` proposes now."""
    async with open_channel(address) as channel:
        stub = draft_service_pb2_grpc.DraftServiceStub(channel)
        info = await stub.GetDraftInfo(draft_service_pb2.GetDraftInfoRequest(), timeout=10.0)
    shape = info.config.shape
    return DraftConfig(
        TreeShape(shape.step_count, shape.topk, shape.draft_token_count), info.config.pinned
    )


def _message(shape: TreeShape) -> token_tree_pb2.TreeShape:
    return token_tree_pb2.TreeShape(
        step_count=shape.num_steps, topk=shape.topk, draft_token_count=shape.num_draft_tokens
    )
