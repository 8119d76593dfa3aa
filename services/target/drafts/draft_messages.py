"""The target's messages to drafts, in protobuf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from services.target.drafts.attachment import DraftMessage, FeatureRows
from services.target.drafts.feature_store import FeatureSpec
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.columns import add_verdicts
from shared.rpc.requests import sampling_message, shape_message
from shared.runtime.mapped_codec import command_message
from shared.runtime.ring_memory import FeatureRingWriter
from shared.runtime.tensor_codec import dtype_from_number, tensor_from_message, tensor_message
from shared.tokens import OpenedSequence, Verdict

MAX_CHUNK_BYTES = 1024 * 1024
"""Largest payload of a feature chunk. Larger messages take milliseconds each."""


def feature_spec(message: pb.FeatureSpec) -> FeatureSpec:
    """Returns the features that a draft asks for.

    Raises:
        InvalidArgument: the data type is unknown or the projection malformed.
    """
    has_projection = message.HasField("projection")
    return FeatureSpec.of(
        tuple(message.layer_indices),
        dtype_from_number(message.data_type),
        tensor_from_message(message.projection) if has_projection else None,
    )


def draft_messages(message: DraftMessage) -> list[pb.SpeculateResponse]:
    """Returns the protobuf messages for one message to a draft.

    Closed sequences come first, so that the draft has room for opened ones. The features of the
    last verdict's own positions are in its message, so that a plain round is one message. All other
    features are sent before it, as chunks.
    """
    responses: list[pb.SpeculateResponse] = []
    if message.closed:
        closed = pb.SequenceClosedBatch(sequence_ids=message.closed)
        responses.append(pb.SpeculateResponse(closed=closed))
    if message.weights is not None:
        updated = pb.WeightsUpdated(
            update_count=message.weights.num_updates, weight_version=message.weights.name
        )
        responses.append(pb.SpeculateResponse(weights_updated=updated))
    if message.opened:
        opened = pb.SequenceOpenedBatch(sequences=map(_opened, message.opened))
        responses.append(pb.SpeculateResponse(opened=opened))
    responses += [
        pb.SpeculateResponse(mapped_head=command_message(command)) for command in message.commands
    ]
    # The batch is filled in place, because copying messages costs more than setting their fields.
    decided = pb.SpeculateResponse()
    add_verdicts(decided.verdicts, message.verdicts)
    if message.features:
        own, before = _rows_by_verdict(message)
        _add_rows(decided.verdicts, own)
        for rows in before:
            responses += _chunks(rows)
    if message.verdicts:
        responses.append(decided)
    return responses


def ring_message(ring: FeatureRingWriter) -> pb.FeatureRing:
    """Returns the address and the size of a draft's ring."""
    address = ring.address
    if address.cuda_ipc_handle:
        return pb.FeatureRing(cuda_ipc_handle=address.cuda_ipc_handle, row_count=ring.num_rows)
    return pb.FeatureRing(shared_file=address.shared_file, row_count=ring.num_rows)


def _has_own(rows: FeatureRows, verdict: Verdict) -> bool:
    """Whether rows end with all rows of a verdict. Only then their positions follow from it. They
    do not where a sequence was preempted and is prefilled again, or where its first rows were not
    stored."""
    # A round computes the root and the accepted path: as many rows as it commits tokens.
    num_own = len(verdict.committed_token_ids)
    return rows.end == verdict.committed_token_count - 1 and rows.num_rows >= num_own


def _chunks(rows: FeatureRows) -> Iterator[pb.SpeculateResponse]:
    row_bytes = rows.rows.shape[1] * rows.rows.element_size()
    is_inline = rows.ring_start is None
    max_rows = max(MAX_CHUNK_BYTES // row_bytes, 1) if is_inline else len(rows.rows)
    # The last prompt row comes with its verdict.
    num_prompt_rows = rows.num_prompt_tokens - 1
    while len(rows.rows):
        part, rows = rows.split(max(len(rows.rows) - max_rows, 0))
        chunk = pb.FeatureChunk(
            sequence_id=part.sequence_id,
            position_offset=part.position_offset,
            rows=tensor_message(part.rows) if is_inline else None,
            ring_rows=pb.RingRows(start=part.ring_start, row_count=len(part.rows))
            if part.ring_start is not None
            else None,
            last=part.end >= num_prompt_rows,
        )
        yield pb.SpeculateResponse(feature_chunk=chunk)


def _rows_by_verdict(
    message: DraftMessage,
) -> tuple[list[FeatureRows | None], list[FeatureRows]]:
    """Returns the rows that belong to each verdict, and the rows to send before them."""
    by_id = {rows.sequence_id: rows for rows in message.features}
    own: list[FeatureRows | None] = [None] * len(message.verdicts)
    before: list[FeatureRows] = []
    # A sequence that was paused may have several verdicts: its rows end with those of the last one.
    for place in range(len(own) - 1, -1, -1):
        verdict = message.verdicts[place]
        rows = by_id.get(verdict.sequence_id)
        if rows is not None and _has_own(rows, verdict):
            del by_id[verdict.sequence_id]
            num_own = len(verdict.committed_token_ids)
            if rows.num_rows > num_own:  # splitting costs more than the rest of a message
                earlier, rows = rows.split(num_own)
                before.append(earlier)
            own[place] = rows
    return own, [*before, *by_id.values()]


def _add_rows(batch: pb.VerdictBatch, own: Sequence[FeatureRows | None]) -> None:
    """Adds the rows of each verdict to a message, those outside the ring as one tensor."""
    present = [rows for rows in own if rows is not None]
    if not present:
        return
    batch.feature_row_counts.extend([0 if rows is None else rows.num_rows for rows in own])
    inline = [rows.rows for rows in present if rows.ring_start is None]
    if len(inline) < len(present):
        starts = [None if rows is None else rows.ring_start for rows in own]
        batch.feature_ring_starts.extend([-1 if start is None else start for start in starts])
    if inline:
        batch.features.CopyFrom(tensor_message(torch.cat(inline)))


def _opened(sequence: OpenedSequence) -> pb.SequenceOpened:
    return pb.SequenceOpened(
        sequence_id=sequence.sequence_id,
        token_ids=sequence.token_ids,
        sampling_params=sampling_message(sequence.sampling),
        round=sequence.round,
        prompt_token_count=sequence.num_prompt_tokens,
        wanted_shape=None
        if sequence.tree_request.shape is None
        else shape_message(sequence.tree_request.shape),
        paused=sequence.tree_request.is_paused,
        wanted_outcome_count=sequence.tree_request.num_outcomes,
        trace_request_id=sequence.request_id,
        traceparent=sequence.traceparent or "",
        cache_salt=sequence.cache_salt,
    )
