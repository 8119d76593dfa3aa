"""Sets the tree shape of a running draft."""

from __future__ import annotations

from shared.pb.outrider.draft.v1 import draft_service_pb2, draft_service_pb2_grpc
from shared.pb.outrider.types.v1 import token_tree_pb2
from shared.rpc.channel import open_channel
from shared.tokens import TreeShape


async def set_shape(address: str, shape: TreeShape) -> None:
    """Tells the draft at `host:port` to propose trees of this shape from now on."""
    async with open_channel(address) as channel:
        stub = draft_service_pb2_grpc.DraftServiceStub(channel)
        await stub.UpdateDraftConfig(
            draft_service_pb2.UpdateDraftConfigRequest(
                config=draft_service_pb2.DraftConfig(shape=_message(shape))
            ),
            timeout=10.0,
        )


async def live_shape(address: str) -> TreeShape:
    """Returns the shape that the draft at `host:port` proposes now."""
    async with open_channel(address) as channel:
        stub = draft_service_pb2_grpc.DraftServiceStub(channel)
        info = await stub.GetDraftInfo(draft_service_pb2.GetDraftInfoRequest(), timeout=10.0)
    shape = info.config.shape
    return TreeShape(shape.step_count, shape.topk, shape.draft_token_count)


def _message(shape: TreeShape) -> token_tree_pb2.TreeShape:
    return token_tree_pb2.TreeShape(
        step_count=shape.num_steps, topk=shape.topk, draft_token_count=shape.num_draft_tokens
    )
