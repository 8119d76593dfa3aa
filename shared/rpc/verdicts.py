"""Verdicts to and from protobuf, in columns. On the hot path: once a step, batched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from shared.errors import InvalidArgument
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.columns import ColumnReader, add_optional, add_shapes
from shared.rpc.trees import shape_from_message
from shared.tokens import ANY_TREE, NO_TREE, Outcome, TreeShape, TreeWish, Verdict

_OUTCOMES = {
    Outcome.VERIFIED: pb.VerdictBatch.OUTCOME_VERIFIED,
    Outcome.MISSED: pb.VerdictBatch.OUTCOME_MISSED,
    Outcome.STALE: pb.VerdictBatch.OUTCOME_STALE,
    Outcome.VERIFIED_NEXT_READY: pb.VerdictBatch.OUTCOME_VERIFIED_NEXT_READY,
}
_OUTCOME_OF: dict[int, Outcome] = {number: outcome for outcome, number in _OUTCOMES.items()}


def add_verdicts(batch: pb.VerdictBatch, verdicts: Sequence[Verdict]) -> None:
    """Puts one step's verdicts into an empty message."""
    if not verdicts:
        return
    batch.sequence_ids.extend([each.sequence_id for each in verdicts])
    batch.rounds.extend([each.round for each in verdicts])
    batch.outcomes.extend([_OUTCOMES[each.outcome] for each in verdicts])
    batch.committed_token_counts.extend([each.committed_token_count for each in verdicts])
    committed = [each.committed_token_ids for each in verdicts]
    _add_ragged(batch.committed_offsets, batch.committed_token_ids, committed)
    accepted = [each.accepted_node_indices for each in verdicts]
    _add_ragged(batch.accepted_offsets, batch.accepted_node_indices, accepted)
    add_optional(batch.candidate_ids, [each.candidate_id or 0 for each in verdicts], 0)
    add_optional(batch.next_candidate_ids, [each.next_candidate_id or 0 for each in verdicts], 0)
    _add_wishes(batch, [each.wish for each in verdicts])
    if any(each.runner_ups for each in verdicts):
        runner_ups = [each.runner_ups for each in verdicts]
        tokens = [[token for token, _ in own] for own in runner_ups]
        _add_ragged(batch.runner_up_offsets, batch.runner_up_token_ids, tokens)
        batch.runner_up_log_probs.extend([each for own in runner_ups for _, each in own])


def verdicts_from_message(batch: pb.VerdictBatch) -> list[Verdict]:
    """Returns the verdicts.

    Raises:
        InvalidArgument: columns do not fit together, an outcome is unknown, no token was committed,
            or a wanted shape or number of outcomes is out of range.
    """
    read = ColumnReader(batch, len(batch.sequence_ids), malformed_verdicts)
    return list(
        map(
            Verdict,
            read.required("sequence_ids"),
            read.required("rounds"),
            [_outcome(number) for number in read.required("outcomes")],
            _ragged(
                read.offsets("accepted_offsets", "accepted_node_indices"),
                batch.accepted_node_indices[:],
            ),
            _committed(read, batch),
            read.required("committed_token_counts"),
            _wishes(read),
            [each or None for each in read.optional("candidate_ids", 0)],
            [each or None for each in read.optional("next_candidate_ids", 0)],
            _runner_ups(read, batch),
        )
    )


def opening_wish(message: pb.SequenceOpened) -> TreeWish:
    """Returns what the target wants of the first tree of a sequence.

    Raises:
        InvalidArgument: the shape or the number of outcomes is out of range.
    """
    shape = shape_from_message(message.wanted_shape) if message.HasField("wanted_shape") else None
    num_outcomes = message.wanted_outcome_count if message.HasField("wanted_outcome_count") else -1
    if message.HasField("wanted_outcome_count") and num_outcomes < 0:
        raise InvalidArgument.out_of_range("wanted_outcome_count", num_outcomes, "at least 0")
    return _wish(shape, num_outcomes, is_paused=message.paused)


def malformed_verdicts(message: str) -> InvalidArgument:
    """Returns the error for verdicts that do not fit together."""
    return InvalidArgument.of("VERDICTS_MALFORMED", "verdicts", f"malformed verdicts: {message}")


def _add_wishes(batch: pb.VerdictBatch, wishes: Sequence[TreeWish]) -> None:
    add_shapes([each.shape for each in wishes], batch.wanted_shape_numbers, batch.wanted_shapes)
    add_optional(batch.paused, [each.is_paused for each in wishes], absent=False)
    counts = [-1 if each.num_outcomes is None else each.num_outcomes for each in wishes]
    add_optional(batch.wanted_outcome_counts, counts, -1)


def _wishes(read: ColumnReader) -> list[TreeWish]:
    shapes = read.shapes("wanted_shape_numbers", "wanted_shapes")
    paused = read.optional("paused", absent=False)
    counts = read.optional("wanted_outcome_counts", -1)
    if counts and min(counts) < -1:
        raise InvalidArgument.out_of_range("wanted_outcome_counts", min(counts), "at least -1")
    # Few differ, and making one costs a microsecond.
    keys = list(zip(shapes, counts, paused, strict=True))
    made = {key: _wish(key[0], key[1], is_paused=key[2]) for key in set(keys)}
    return [made[key] for key in keys]


def _wish(shape: TreeShape | None, num_outcomes: int, *, is_paused: bool) -> TreeWish:
    if is_paused:
        return NO_TREE
    if shape is None and num_outcomes < 0:
        return ANY_TREE
    return TreeWish(shape, num_outcomes=None if num_outcomes < 0 else num_outcomes)


def _outcome(number: int) -> Outcome:
    outcome = _OUTCOME_OF.get(number)
    if outcome is None:
        raise InvalidArgument.of("OUTCOME_UNKNOWN", "outcomes", f"an outcome is {number}")
    return outcome


def _committed(read: ColumnReader, batch: pb.VerdictBatch) -> list[tuple[int, ...]]:
    offsets = read.offsets("committed_offsets", "committed_token_ids")
    committed = _ragged(offsets, batch.committed_token_ids[:])
    if not all(committed):
        raise InvalidArgument.of(
            "VERDICT_EMPTY", "committed_offsets", "a verdict commits at least 1 token; one has 0"
        )
    return committed


def _runner_ups(read: ColumnReader, batch: pb.VerdictBatch) -> list[tuple[tuple[int, float], ...]]:
    if not batch.runner_up_offsets:
        return [()] * len(batch.sequence_ids)
    offsets = read.offsets("runner_up_offsets", "runner_up_token_ids", "runner_up_log_probs")
    pairs = zip(batch.runner_up_token_ids, batch.runner_up_log_probs, strict=True)
    return _ragged(offsets, list(pairs))


def _add_ragged(offsets: Any, values: Any, rows: Sequence[Sequence[int]]) -> None:
    offsets.extend(accumulate(map(len, rows), initial=0))
    values.extend([each for row in rows for each in row])


def _ragged(offsets: Sequence[int], values: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(values[start:end]) for start, end in pairwise(offsets)]
