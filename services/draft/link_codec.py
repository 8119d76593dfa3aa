"""Codec of the `Speculate` stream: messages to events, outputs to messages, and feature rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from services.draft.events import (
    MAX_TREE_NODES,
    CandidatesReady,
    Event,
    FeatureRows,
    FeaturesArrived,
    LinkTerms,
    MappedCommandArrived,
    MappedHeadReady,
    Output,
    RoundResult,
    RoundsDecided,
    SequencesClosed,
    SequencesOpened,
    SequencesReleased,
    WeightsUpdated,
    WorkerIdentity,
)
from shared.errors import FailedPrecondition, InvalidArgument
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.types.v1 import tensor_pb2
from shared.rpc.columns import (
    ColumnReader,
    add_candidates,
    malformed_verdicts,
    opening_tree_request,
    verdicts_from_message,
)
from shared.rpc.requests import sampling_from_message, shape_from_message, shape_message
from shared.tokens import OpenedSequence

if TYPE_CHECKING:
    from torch import Tensor

    from shared.models.heads.feature_spec import FeatureSpec
    from shared.runtime.ring_memory import FeatureRingReader

log = logging.getLogger(__name__)


# Feature rows on the wire are checked against the drafter's spec here: malformed rows would
# otherwise fail later, inside a forward.


def rows_from_message(message: tensor_pb2.Tensor, spec: FeatureSpec) -> Tensor:
    """Returns feature rows `[R, W]` of a target, in host memory.

    Raises:
        InvalidArgument: the rows do not match the spec; names both shapes.
    """
    from shared.runtime.tensor_codec import tensor_from_message

    rows = tensor_from_message(message)
    if rows.ndim != 2 or rows.shape[1] != spec.width or rows.dtype != spec.dtype:
        raise bad_features(
            f"rows are {list(rows.shape)} of {rows.dtype}; they must be [R, {spec.width}] of "
            f"{spec.dtype}"
        )
    return rows


def probe_features(
    message: tensor_pb2.Tensor | None, spec: FeatureSpec | None, *, num_tokens: int, algorithm: str
) -> FeatureRows | None:
    """Returns the features of a probe; None for a drafter that reads tokens.

    Args:
        message: None when the request has no features.
        num_tokens: length of the prompt; each token but the last has a row.

    Raises:
        FailedPrecondition: the drafter reads features, and the request has none.
        InvalidArgument: the features do not match the spec; names both shapes.
    """
    if spec is None:
        if message is not None:
            raise bad_features(
                f"{algorithm} drafts from tokens; leave the features out", field="features"
            )
        return None
    widths = sorted({spec.width, spec.layer_width})
    expected = " or ".join(f"[{num_tokens - 1}, {width}]" for width in widths)
    if message is None:
        raise FailedPrecondition(
            f"{algorithm} drafts from the target's hidden states of layers "
            f"{list(spec.layer_indices)}: give {expected} of {spec.dtype} as features",
            reason="PROBE_NEEDS_FEATURES",
        )
    from shared.runtime.tensor_codec import tensor_from_message

    rows = tensor_from_message(message)
    fits = rows.ndim == 2 and rows.shape[0] == num_tokens - 1 and rows.shape[1] in widths
    if not fits or rows.dtype != spec.dtype:
        raise bad_features(
            f"features are {list(rows.shape)} of {rows.dtype}; {num_tokens:,} tokens need "
            f"{expected} of {spec.dtype}",
            field="features",
        )
    return FeatureRows(0, spec.projected(rows))


def bad_features(message: str, *, field: str = "rows") -> InvalidArgument:
    """Returns the error for features that the drafter did not ask for in this form."""
    return InvalidArgument.of("FEATURES_MALFORMED", field, message)


def attach_request(identity: WorkerIdentity) -> pb.SpeculateRequest:
    """Returns the first message of a stream."""
    host_id, ring = identity.host_id, None
    if host_id:
        ring = pb.FeatureRingOffer(host_id=host_id, reads_cuda=identity.reads_cuda)
    return pb.SpeculateRequest(
        attach=pb.Attach(
            worker_id=identity.worker_id,
            model_id=identity.model_id,
            tokenizer_sha256=identity.tokenizer_sha256 or "",
            max_sequence_count=identity.max_sequences,
            max_node_count=MAX_TREE_NODES,
            algorithm=identity.algorithm,
            max_context_token_count=identity.max_context_tokens or 0,
            feature_spec=_spec_message(identity.feature_spec),
            feature_ring=ring,
            shape=None if identity.shape is None else shape_message(identity.shape),
            learns=identity.learns,
            mapped_head=_mapped_offer(identity),
        )
    )


def terms_from_message(attached: pb.Attached, spec: FeatureSpec | None) -> LinkTerms:
    """Returns the terms of an attachment.

    Args:
        spec: the features that the draft asked for.

    Raises:
        FailedPrecondition: a verification mode this draft does not know, or features of another
            width than the draft reads.
    """
    width = 0 if spec is None else spec.width
    if attached.feature_width != width:
        raise FailedPrecondition(
            f"the target sends features {attached.feature_width} wide; this draft reads {width}",
            reason="FEATURE_WIDTH_MISMATCH",
        )
    mode = attached.verification_mode
    if mode not in (pb.VERIFICATION_MODE_COUPLED, pb.VERIFICATION_MODE_POINT_MASS):
        raise FailedPrecondition(
            f"the target verifies by mode {mode}, which this draft does not know",
            reason="VERIFICATION_MODE_UNKNOWN",
        )
    return LinkTerms(
        vocab_size=attached.vocab_size,
        max_nodes=min(attached.max_node_count, MAX_TREE_NODES),
        max_sequences=attached.max_sequence_count,
        mirrors_noise=mode == pb.VERIFICATION_MODE_COUPLED,
        max_conditional=attached.max_conditional_candidate_count,
        shapes=tuple(map(shape_from_message, attached.candidate_shapes)),
    )


def open_ring(attached: pb.Attached, identity: WorkerIdentity) -> FeatureRingReader | None:
    """Opens the feature ring that a target on this host shares. None when the target shares none or
    the ring cannot be opened: features then come as bytes."""
    memory, ring = attached.feature_ring.WhichOneof("memory"), attached.feature_ring
    spec = identity.feature_spec
    if spec is None or memory is None:
        return None
    import torch

    from shared.runtime.ring_memory import FeatureRingReader, RingAddress, RingUnavailable

    address = RingAddress(ring.shared_file, ring.cuda_ipc_handle)
    device = torch.device(identity.device)
    try:
        return FeatureRingReader(address, ring.row_count, spec.width, spec.dtype, device)
    except RingUnavailable as error:
        log.warning("features come as bytes: %s", error)
        return None


def ring_taken_request(end: int) -> pb.SpeculateRequest:
    """Returns the message that frees the ring's rows before `end`."""
    return pb.SpeculateRequest(feature_ring_taken=pb.FeatureRingTaken(end=end))


def weights_updated_request(version: str) -> pb.SpeculateRequest:
    """Returns the message that the draft has new weights."""
    return pb.SpeculateRequest(weights_updated=pb.DraftWeightsUpdated(weight_version=version))


def event_from_response(
    link: int,
    response: pb.SpeculateResponse,
    spec: FeatureSpec | None,
    ring: FeatureRingReader | None = None,
) -> Event | None:
    """Returns the event of a message after `attached`; None for kinds of a newer protocol.

    Args:
        spec: the features that the draft asked for.
        ring: holds the rows that are not sent as bytes.

    Raises:
        InvalidArgument: the message is malformed, has unexpected features, or attaches again.
    """
    match response.WhichOneof("message"):
        case "verdicts":
            return RoundsDecided(link, _results(response.verdicts, spec, ring))
        case "opened":
            return SequencesOpened(link, tuple(map(_opening, response.opened.sequences)))
        case "closed":
            return SequencesClosed(link, tuple(response.closed.sequence_ids))
        case "feature_chunk":
            chunk = response.feature_chunk
            rows = _chunk_rows(chunk, spec, ring)
            features = _feature_rows(rows, chunk.position_offset)
            return FeaturesArrived(link, chunk.sequence_id, features)
        case "mapped_head":
            from shared.runtime.mapped_codec import command_from_message

            command = command_from_message(response.mapped_head)
            return None if command is None else MappedCommandArrived(link, command)
        case "weights_updated":
            return WeightsUpdated(link, response.weights_updated.update_count)
        case "attached":
            raise InvalidArgument.of("ATTACHED_TWICE", "attached", "a second `attached` arrived")
    return None


def request_from_output(output: Output) -> pb.SpeculateRequest:
    """Returns the message for an output of the engine on a target's link."""
    if isinstance(output, CandidatesReady):
        request = pb.SpeculateRequest()
        add_candidates(request.candidates, output.candidates, output.report)
        return request
    if isinstance(output, MappedHeadReady):
        return pb.SpeculateRequest(mapped_head_ready=pb.MappedHeadReady(pages=output.pages))
    assert isinstance(output, SequencesReleased), "probes have no wire form"
    return pb.SpeculateRequest(release=pb.Release(sequence_ids=output.sequence_ids))


def _opening(message: pb.SequenceOpened) -> OpenedSequence:
    return OpenedSequence(
        sequence_id=message.sequence_id,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.prompt_token_count,
        # The target always sends its seed. Without noise to mirror, any seed will do.
        sampling=sampling_from_message(message.sampling_params, draw_seed=lambda: 0),
        round=message.round,
        tree_request=opening_tree_request(message),
        request_id=message.trace_request_id,
        traceparent=message.traceparent or None,
        cache_salt=message.cache_salt,
    )


def _results(
    batch: pb.VerdictBatch, spec: FeatureSpec | None, ring: FeatureRingReader | None
) -> tuple[RoundResult, ...]:
    verdicts = verdicts_from_message(batch)
    if not batch.feature_row_counts:
        return tuple(map(RoundResult, verdicts))
    results: list[RoundResult] = []
    for verdict, rows in zip(verdicts, _verdict_rows(batch, spec, ring), strict=True):
        # The first row is that of the verified tree's root.
        root_position = verdict.committed_token_count - len(verdict.committed_token_ids) - 1
        features = None if rows is None else _feature_rows(rows, root_position)
        results.append(RoundResult(verdict, features))
    return tuple(results)


def _verdict_rows(
    batch: pb.VerdictBatch, spec: FeatureSpec | None, ring: FeatureRingReader | None
) -> list[Tensor | None]:
    """Returns the feature rows of each verdict; None for a verdict without rows."""
    columns = ColumnReader(batch, len(batch.sequence_ids), malformed_verdicts)
    counts: list[int] = columns.required("feature_row_counts")
    starts: list[int] = columns.optional("feature_ring_starts", -1)
    if min(counts) < 0:
        raise bad_features(f"a verdict has {min(counts)} rows; it must have 0 or more")
    inline_counts = [count if start < 0 else 0 for count, start in zip(counts, starts, strict=True)]
    rows = list(_inline_rows(batch, spec, inline_counts))
    in_ring = [verdict for verdict, start in enumerate(starts) if start >= 0 and counts[verdict]]
    for span in _contiguous_spans(sorted(in_ring, key=starts.__getitem__), starts, counts):
        # One copy for all verdicts of a step: it takes as long as the copy of one row.
        end, first = starts[span[-1]] + counts[span[-1]], starts[span[0]]
        copied = _from_ring(first, end - first, ring)
        for verdict in span:
            offset = starts[verdict] - first
            rows[verdict] = copied[offset : offset + counts[verdict]]
    return [piece if count else None for piece, count in zip(rows, counts, strict=True)]


def _contiguous_spans(
    verdicts: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> list[list[int]]:
    """Groups verdicts whose rows are contiguous in the ring.

    Args:
        verdicts: indices of verdicts, in the order of their rows in the ring.
    """
    spans: list[list[int]] = []
    end = -1
    for verdict in verdicts:
        if starts[verdict] != end:
            spans.append([])
        spans[-1].append(verdict)
        end = starts[verdict] + counts[verdict]
    return spans


def _inline_rows(
    batch: pb.VerdictBatch, spec: FeatureSpec | None, counts: list[int]
) -> Sequence[Tensor | None]:
    """Returns, for each verdict, its rows that were sent as bytes."""
    if spec is None:
        raise bad_features("features arrived; none were asked for")
    if not any(counts):
        return [None] * len(counts)
    rows = rows_from_message(batch.features, spec)
    if len(rows) != sum(counts):
        raise bad_features(f"{len(rows)} rows arrived; the verdicts count {sum(counts)}")
    ends = accumulate(counts, initial=0)
    return [rows[start:end] for start, end in pairwise(ends)]


def _chunk_rows(
    chunk: pb.FeatureChunk, spec: FeatureSpec | None, ring: FeatureRingReader | None
) -> Tensor:
    """Returns the rows that a chunk holds as bytes or names in the ring."""
    if spec is None:
        raise bad_features("features arrived; none were asked for")
    if chunk.HasField("ring_rows"):
        return _from_ring(chunk.ring_rows.start, chunk.ring_rows.row_count, ring)
    return rows_from_message(chunk.rows, spec)


def _from_ring(start: int, count: int, ring: FeatureRingReader | None) -> Tensor:
    if ring is None:
        raise bad_features("rows lie in a ring; none was opened")
    try:
        return ring.read(start, count)
    except ValueError as error:
        raise bad_features(str(error)) from error


def _feature_rows(rows: Tensor, offset: int) -> FeatureRows:
    if offset < 0:
        raise bad_features(f"rows start at position {offset}; it must be 0 or more")
    return FeatureRows(offset, rows)


def _mapped_offer(identity: WorkerIdentity) -> pb.MappedHeadOffer | None:
    head = identity.mapped_head
    if head is None or not identity.host_id:
        return None
    return pb.MappedHeadOffer(
        host_id=identity.host_id,
        device_id=identity.device_id,
        page_size=head.page_size,
        vocab_size=head.vocab_size,
        max_context_token_count=head.max_context_tokens,
        shape_pinned=identity.is_shape_pinned,
        outcome_count=head.num_outcomes,
    )


def _spec_message(spec: FeatureSpec | None) -> pb.FeatureSpec | None:
    if spec is None:
        return None
    from shared.runtime.tensor_codec import data_type_number, tensor_message

    return pb.FeatureSpec(
        layer_indices=spec.layer_indices,
        data_type=data_type_number(spec.dtype),
        projection=None if spec.projection is None else tensor_message(spec.projection),
    )
