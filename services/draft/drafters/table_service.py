"""The target's embedding and lm_head that a head uses, updated with the target's weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import torch
from grpc import aio
from torch import Tensor

from services.draft.drafters.dflash import DflashDrafter
from services.draft.drafters.drafter import Drafter
from services.draft.drafters.eagle import EagleDrafter
from services.draft.settings import DraftSettings
from shared.errors import InvalidArgument, OutriderError
from shared.models.decoder import Decoder
from shared.models.heads.target_tensors import (
    BorrowedTensors,
    Table,
    TargetTensors,
    target_tensors,
)
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.speculation.v1 import speculation_service_pb2_grpc as pb_grpc
from shared.rpc.status import error_from_rpc
from shared.runtime.tensor_codec import data_type_number, tensor_from_message

log = logging.getLogger(__name__)


def borrowed_tensors(
    settings: DraftSettings, drafter: Drafter, decoder: Decoder | None = None
) -> BorrowedTensors | None:
    """Returns what a drafter borrows; None where it has no head.

    Args:
        decoder: that the head was loaded beside; None where it was loaded from the target's folder.
    """
    if isinstance(drafter, DflashDrafter):
        lm_head, token_ids = drafter.head.lm_head, None
    elif isinstance(drafter, EagleDrafter):
        lm_head = drafter.head.vocabulary.lm_head
        token_ids = drafter.head.vocabulary.token_ids
    else:
        return None
    own = drafter.head.embedding
    target = target_tensors(settings.target_folder, decoder, dtype=own.dtype, device=own.device)
    return BorrowedTensors(target, own, lm_head, token_ids)


class BorrowedTables:
    """Reads borrowed tables of a target in another process anew, and swaps them in.

    Args:
        between: runs a function between two rounds; blocks.

    Attributes:
        num_updates: of the target whose tables are in force; 0 for those of the start.
    """

    def __init__(
        self, borrowed: BorrowedTensors, between: Callable[[Callable[[], None]], None]
    ) -> None:
        self.num_updates = 0
        self._borrowed, self._between = borrowed, between

    async def follow(self, channel: aio.Channel, num_updates: int) -> None:
        """The target has had `num_updates`. The old tables stay where it cannot be read: trees get
        worse, and no token wrong."""
        stub = pb_grpc.SpeculationServiceStub(channel)
        try:
            tables = {
                each: await self._read(stub, each, num_updates) for each in self._borrowed.tables
            }
            target = TargetTensors(self._borrowed.config, tables.__getitem__)
            await asyncio.to_thread(self._between, lambda: self._borrowed.follow(target))
        except (aio.AioRpcError, OutriderError) as failure:
            error = error_from_rpc(failure) if isinstance(failure, aio.AioRpcError) else failure
            log.warning("old tables stay in the head: %s: %s", error.reason, error.message)
            return
        self.num_updates = num_updates
        log.info("%d tables follow update %d of the target", len(tables), num_updates)

    async def _read(
        self, stub: pb_grpc.SpeculationServiceStub, table: Table, num_updates: int
    ) -> Tensor:
        """Raises: AioRpcError, or InvalidArgument for a table of another shape."""
        request = pb.ReadTableRequest(
            table=table.value,  # type: ignore[arg-type]
            data_type=data_type_number(self._borrowed.dtype),
            update_count=num_updates,
        )
        config, dtype = self._borrowed.config, self._borrowed.dtype
        shape = (config.vocab_size, config.hidden_size)
        whole = torch.empty(shape, dtype=dtype, device=self._borrowed.device)
        start = 0
        async for part in stub.ReadTable(request):
            rows = tensor_from_message(part.rows)
            end = start + len(rows)
            if end > len(whole) or rows.shape[1:] != whole.shape[1:]:
                break
            whole[start:end] = rows
            start = end
        if start != len(whole):
            message = f"the target's {table.name.lower()} has another shape than {list(shape)}"
            raise InvalidArgument.of("TABLE_MALFORMED", "rows", message)
        return whole
