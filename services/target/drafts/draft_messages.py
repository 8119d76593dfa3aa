"""The target's messages to drafts, in protobuf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from services.target.drafts.attachment import DraftMessage, FeatureRows, OpenedSequence
from services.target.drafts.feature_store import FeatureSpec
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.columns import add_verdicts
from shared.rpc.requests import sampling_message, shape_message
from shared.runtime.mapped_codec import command_message
from shared.runtime.ring_memory import FeatureRingWriter
from shared.runtime.tensor_codec import dtype_from_number, tensor_from_message, tensor_message
from shared.tokens import Verdict

MAX_CHUNK_BYTES = 1024 * 1024
"""Largest payload of a feature chunk: above it a message costs milliseconds."""


def feature_spec(message: pb.FeatureSpec) -> FeatureSpec:
    """Returns the spec a draft asks for.

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
    """Returns what one step has to say to a draft.

    Closed comes first, so that the draft has room for opened. The features of the last verdict's
    own positions travel with it, so that a plain round is one message; others are chunks before.
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
        pb.SpeculateResponse(mapped_head=command_message(each)) for each in message.commands
    ]
    # Filled in where it is, as copies of messages cost more than their fields.
    decided = pb.SpeculateResponse()
    add_verdicts(decided.verdicts, message.verdicts)
    if message.features:
        own, before = _with_verdicts(message)
        _add_rows(decided.verdicts, own)
        for each in before:
            responses += _chunks(each)
    if message.verdicts:
        responses.append(decided)
    return responses


def ring_message(ring: FeatureRingWriter) -> pb.FeatureRing:
    """Returns where a draft finds its ring."""
    address = ring.address
    if address.cuda_ipc_handle:
        return pb.FeatureRing(cuda_ipc_handle=address.cuda_ipc_handle, row_count=ring.num_rows)
    return pb.FeatureRing(shared_file=address.shared_file, row_count=ring.num_rows)


def _has_own(rows: FeatureRows, verdict: Verdict) -> bool:
    """Whether rows end with all those of a verdict, as where they are follows from it. They do not
    where a sequence was preempted and is read anew, or where the first ones are not known."""
    # A round computes the root and the accepted path: as many as it commits.
    num_own = len(verdict.committed_token_ids)
    return rows.end == verdict.committed_token_count - 1 and rows.num_rows >= num_own


def _chunks(rows: FeatureRows) -> Iterator[pb.SpeculateResponse]:
    row_bytes = rows.rows.shape[1] * rows.rows.element_size()
    is_inline = rows.ring_start is None
    max_rows = max(MAX_CHUNK_BYTES // row_bytes, 1) if is_inline else len(rows.rows)
    while len(rows.rows):
        part, rows = rows.split(max(len(rows.rows) - max_rows, 0))
        chunk = pb.FeatureChunk(
            sequence_id=part.sequence_id,
            position_offset=part.position_offset,
            rows=tensor_message(part.rows) if is_inline else None,
            ring_rows=None if is_inline else _ring_rows(part),
            last=part.completes_prompt,
        )
        yield pb.SpeculateResponse(feature_chunk=chunk)


def _with_verdicts(
    message: DraftMessage,
) -> tuple[list[FeatureRows | None], list[FeatureRows]]:
    """Returns the rows that belong to each verdict, and those that come before."""
    rows = {each.sequence_id: each for each in message.features}
    own: list[FeatureRows | None] = [None] * len(message.verdicts)
    before: list[FeatureRows] = []
    # Of a sequence that was paused there may be several: the rows end where the last one does.
    for place in range(len(own) - 1, -1, -1):
        verdict = message.verdicts[place]
        found = rows.get(verdict.sequence_id)
        if found is not None and _has_own(found, verdict):
            del rows[verdict.sequence_id]
            num_own = len(verdict.committed_token_ids)
            if found.num_rows > num_own:  # splitting costs more than the rest of a message
                earlier, found = found.split(num_own)
                before.append(earlier)
            own[place] = found
    return own, [*before, *rows.values()]


def _add_rows(batch: pb.VerdictBatch, own: Sequence[FeatureRows | None]) -> None:
    """Puts the rows of each verdict into a message: all that are not in the ring as one tensor."""
    placed = [each for each in own if each is not None]
    if not placed:
        return
    batch.feature_row_counts.extend([0 if each is None else each.num_rows for each in own])
    inline = [each.rows for each in placed if each.ring_start is None]
    if len(inline) < len(placed):
        starts = [None if each is None else each.ring_start for each in own]
        batch.feature_ring_starts.extend([-1 if each is None else each for each in starts])
    if inline:
        batch.features.CopyFrom(tensor_message(torch.cat(inline)))


def _ring_rows(rows: FeatureRows) -> pb.RingRows:
    assert rows.ring_start is not None
    return pb.RingRows(start=rows.ring_start, row_count=len(rows.rows))


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
