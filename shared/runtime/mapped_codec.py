"""Protobuf messages of the commands of `mapped_rounds`."""

from __future__ import annotations

from shared.errors import InvalidArgument
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.requests import shape_from_message, shape_message
from shared.runtime.mapped_rounds import (
    FeatureAddress,
    MappedCommand,
    MappedRound,
    OpenMapped,
    PrepareMapped,
)
from shared.runtime.ring_memory import RingAddress
from shared.runtime.round_batches import RoundShape, SizedShape
from shared.runtime.round_head import HeadBacklog
from shared.runtime.round_state import RoundSampling


def command_message(command: MappedCommand) -> pb.MappedHeadCommand:
    """Returns the message of a command."""
    match command:
        case OpenMapped():
            return pb.MappedHeadCommand(open=_open_message(command))
        case PrepareMapped():
            prepare = pb.MappedHeadPrepare(
                shape_number=command.number,
                slot_count=command.num_slots,
                sampling_kind=command.sampling.value,
                last=command.is_last,
            )
            return pb.MappedHeadCommand(prepare=prepare)
    announced = pb.MappedHeadRound(
        shape_number=command.number,
        slot_count=command.num_slots,
        sampling_kind=command.sampling.value,
        backlogs=map(_backlog_message, command.backlogs),
        ahead=command.is_ahead,
        open_shape_number=command.open_shape,
    )
    return pb.MappedHeadCommand(round=announced)


def command_from_message(message: pb.MappedHeadCommand) -> MappedCommand | None:
    """Returns the command of a message; None for kinds added later.

    Raises:
        InvalidArgument: a kind of sampling is unknown.
    """
    match message.WhichOneof("command"):
        case "open":
            return _open_command(message.open)
        case "prepare":
            prepare = message.prepare
            return PrepareMapped(
                prepare.shape_number,
                prepare.slot_count,
                _sampling(prepare.sampling_kind),
                prepare.last,
            )
        case "round":
            announced = message.round
            return MappedRound(
                announced.shape_number,
                announced.slot_count,
                _sampling(announced.sampling_kind),
                tuple(map(_backlog, announced.backlogs)),
                announced.ahead,
                announced.open_shape_number if announced.HasField("open_shape_number") else None,
            )
    return None


def _open_message(command: OpenMapped) -> pb.MappedHeadOpen:
    features = command.features or FeatureAddress(RingAddress(), 0, 0)
    return pb.MappedHeadOpen(
        shared_file=command.address.shared_file,
        cuda_ipc_handle=command.address.cuda_ipc_handle,
        feature_shared_file=features.address.shared_file,
        feature_cuda_ipc_handle=features.address.cuda_ipc_handle,
        feature_start_bytes=features.start_bytes,
        feature_row_count=features.num_rows,
        last_round=command.last_round,
        shapes=[
            pb.MappedHeadShape(
                tree=shape_message(sized.shape.tree),
                row_count=sized.shape.num_tree_rows,
                max_kv_length=sized.shape.max_kv_length,
                max_sequence_count=sized.max_sequences,
                outcome_count=sized.shape.num_outcomes,
            )
            for sized in command.shapes
        ],
    )


def _open_command(message: pb.MappedHeadOpen) -> OpenMapped:
    return OpenMapped(
        RingAddress(message.shared_file, message.cuda_ipc_handle),
        _feature_address(message),
        tuple(
            SizedShape(
                RoundShape(
                    shape_from_message(sized.tree),
                    sized.row_count,
                    sized.max_kv_length,
                    sized.outcome_count,
                ),
                sized.max_sequence_count,
            )
            for sized in message.shapes
        ),
        message.last_round,
    )


def _feature_address(message: pb.MappedHeadOpen) -> FeatureAddress | None:
    if not message.feature_row_count:
        return None
    address = RingAddress(message.feature_shared_file, message.feature_cuda_ipc_handle)
    return FeatureAddress(address, message.feature_start_bytes, message.feature_row_count)


def _sampling(number: int) -> RoundSampling:
    try:
        return RoundSampling(number)
    except ValueError:
        message = f"sampling_kind is {number}; it must be 0, 1 or 2"
        raise InvalidArgument.of("COMMAND_MALFORMED", "sampling_kind", message) from None


def _backlog_message(backlog: HeadBacklog) -> pb.MappedHeadBacklog:
    return pb.MappedHeadBacklog(
        token_ids=backlog.token_ids[backlog.start : backlog.end + 1],
        start=backlog.start,
        end=backlog.end,
        pages=backlog.pages,
        head_pages=backlog.head_pages,
    )


def _backlog(message: pb.MappedHeadBacklog) -> HeadBacklog:
    tokens = [*[0] * message.start, *message.token_ids]
    return HeadBacklog(
        tokens, message.start, message.end, list(message.pages), list(message.head_pages)
    )
