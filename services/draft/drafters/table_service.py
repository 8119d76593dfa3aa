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
    """Returns the target's tensors that a drafter uses; None where it has no head.

    Args:
        decoder: the target's decoder, if the head uses its tensors; None where they were loaded
            from the target's folder.
    """
    if isinstance(drafter, DflashDrafter):
        lm_head, token_ids = drafter.head.lm_head, None
    elif isinstance(drafter, EagleDrafter):
        lm_head = drafter.head.vocabulary.lm_head
        token_ids = drafter.head.vocabulary.token_ids
    else:
        return None
    embedding = drafter.head.embedding
    dtype, device = embedding.dtype, embedding.device
    target = target_tensors(settings.target_folder, decoder, dtype=dtype, device=device)
    return BorrowedTensors(target, embedding, lm_head, token_ids)


class BorrowedTables:
    """Reads the borrowed tables of a target in another process again, and swaps them in.

    Args:
        between_rounds: runs a function between two rounds; blocks.

    Attributes:
        num_updates: weight update of the target that the tables are from; 0 for those of the start.
    """

    def __init__(
        self, borrowed: BorrowedTensors, between_rounds: Callable[[Callable[[], None]], None]
    ) -> None:
        self.num_updates = 0
        self._borrowed, self._between_rounds = borrowed, between_rounds

    async def reload(self, channel: aio.Channel, num_updates: int) -> None:
        """Reads the tables of the target's weight update `num_updates`. If that fails, the old
        tables stay: acceptance falls, and no generated token changes."""
        stub = pb_grpc.SpeculationServiceStub(channel)
        try:
            tables = {
                table: await self._read(stub, table, num_updates) for table in self._borrowed.tables
            }
            target = TargetTensors(self._borrowed.config, tables.__getitem__)
            await asyncio.to_thread(self._between_rounds, lambda: self._borrowed.follow(target))
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
