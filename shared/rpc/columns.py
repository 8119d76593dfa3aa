"""Candidates and verdicts to and from the columns of protobuf messages. Received columns are
checked: entry i of each belongs to one candidate or verdict. Called once a step, batched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shared.candidate_columns import CandidateColumns
from shared.errors import InvalidArgument
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.requests import shape_from_message, shape_message
from shared.tokens import ANY_TREE, NO_TREE, DraftReport, Outcome, TreeRequest, TreeShape, Verdict

T = TypeVar("T")
Refusal = Callable[[str], InvalidArgument]
"""Returns the error for columns that do not fit together, from its message."""

_OUTCOMES = {
    Outcome.VERIFIED: pb.VerdictBatch.OUTCOME_VERIFIED,
    Outcome.MISSED: pb.VerdictBatch.OUTCOME_MISSED,
    Outcome.STALE: pb.VerdictBatch.OUTCOME_STALE,
    Outcome.VERIFIED_NEXT_READY: pb.VerdictBatch.OUTCOME_VERIFIED_NEXT_READY,
}
_OUTCOME_OF: dict[int, Outcome] = {number: outcome for outcome, number in _OUTCOMES.items()}


@dataclass(frozen=True, slots=True)
class ColumnReader:
    """Reads the columns of one message.

    Attributes:
        count: entries of each column.
    """

    message: Any
    count: int
    refusal: Refusal

    def required(self, name: str) -> list[Any]:
        """Returns a column.

        Raises:
            InvalidArgument: it is not as long as the others.
        """
        # A slice copies a repeated field in one call; iteration costs a call per element.
        column: list[Any] = getattr(self.message, name)[:]
        if len(column) != self.count:
            raise self.refusal(f"{name} has {len(column)} entries; it must have {self.count}")
        return column

    def optional(self, name: str, absent: T) -> list[T]:
        """Returns a column that may be empty, which means that each entry is `absent`.

        Raises:
            InvalidArgument: it is neither empty nor as long as the others.
        """
        return self.required(name) if getattr(self.message, name) else [absent] * self.count

    def offsets(self, name: str, *columns: str) -> list[int]:
        """Returns a column of offsets: where the values of each entry begin in `columns`.

        Raises:
            InvalidArgument: the offsets do not ascend from 0 to the length of `columns`.
        """
        offsets: list[int] = getattr(self.message, name)[:]
        if not self.count and not offsets:
            offsets = [0]
        if len(offsets) != self.count + 1:
            raise self.refusal(
                f"{name} has {len(offsets)} entries; it must have one more than "
                f"there are sequence ids, {self.count + 1}"
            )
        if offsets[0] != 0:
            raise self.refusal(f"{name} begins at {offsets[0]}; it must begin at 0")
        for place in np.flatnonzero(np.diff(offsets) < 0)[:1].tolist():
            raise self.refusal(
                f"{name} descends from {offsets[place]} to {offsets[place + 1]} at {place + 1}"
            )
        for column in columns:
            length = len(getattr(self.message, column))
            if length != offsets[-1]:
                raise self.refusal(f"{name} ends at {offsets[-1]}; {column} has {length} entries")
        return offsets

    def shapes(self, numbers: str, shapes: str) -> list[TreeShape | None]:
        """Returns the shape of each entry. The column `numbers` holds an index from 1 into the
        column `shapes`, or 0 for None.

        Raises:
            InvalidArgument: there is no such shape, or it is out of range.
        """
        distinct = [None, *map(shape_from_message, getattr(self.message, shapes))]
        indices = self.optional(numbers, 0)
        for index in indices:
            if not 0 <= index < len(distinct):
                raise self.refusal(f"{numbers} holds {index}; {shapes} has {len(distinct) - 1}")
        return [distinct[index] for index in indices]


def add_shapes(shapes: Sequence[TreeShape | None], numbers: Any, messages: Any) -> None:
    """Adds each distinct shape to `messages`, and the index from 1 of each entry's shape (0 for
    None) to `numbers`. Both stay empty if no entry has a shape."""
    if not any(shapes):
        return
    distinct = dict.fromkeys(shape for shape in shapes if shape is not None)
    indices: dict[TreeShape | None, int] = {shape: index for index, shape in enumerate(distinct, 1)}
    indices[None] = 0
    messages.extend(map(shape_message, distinct))
    numbers.extend([indices[shape] for shape in shapes])


def add_optional(column: Any, values: Sequence[T], absent: T) -> None:
    """Fills a column, unless each value is `absent`."""
    if any(value != absent for value in values):
        column.extend(values)


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """A target's limits on trees.

    Attributes:
        max_nodes: most nodes of a tree.
        vocab_size: upper bound of token ids.
        max_depth: greatest depth of a node, which a sliding window of the model limits.
    """

    max_nodes: int
    vocab_size: int
    max_depth: int


def add_candidates(
    batch: pb.CandidateBatch, columns: CandidateColumns, report: DraftReport
) -> None:
    """Writes one step's candidates into an empty message."""
    batch.sequence_ids.extend(columns.sequence_ids)
    batch.rounds.extend(columns.rounds)
    batch.committed_token_counts.extend(columns.committed_token_counts)
    add_optional(batch.candidate_ids, columns.candidate_ids, 0)
    if any(bonus >= 0 for bonus in columns.bonus_token_ids):
        batch.condition_bonus_token_ids.extend(columns.bonus_token_ids)
        batch.condition_node_indices.extend(columns.node_indices)
        batch.condition_candidate_ids.extend(columns.conditioned_ids)
    add_shapes(columns.shapes, batch.shape_numbers, batch.shapes)
    if columns.sequence_ids:
        batch.node_offsets.extend(columns.node_offsets)
    batch.token_ids.extend(columns.token_ids)
    batch.parent_indices.extend(columns.parent_indices)
    if not all(map(math.isnan, columns.log_probs)):
        batch.log_probs.extend(columns.log_probs)
    batch.warming = report.is_warming
    if report.draft_s is not None:
        batch.draft_duration.FromNanoseconds(round(report.draft_s * 1e9))
    if report.pinned_shape is not None:
        batch.pinned_shape.CopyFrom(shape_message(report.pinned_shape))


def report_from_message(batch: pb.CandidateBatch) -> DraftReport:
    """Returns the draft's report in a batch of candidates.

    Raises:
        InvalidArgument: the pinned shape is out of range.
    """
    has_time, has_shape = batch.HasField("draft_duration"), batch.HasField("pinned_shape")
    return DraftReport(
        draft_s=batch.draft_duration.ToNanoseconds() / 1e9 if has_time else None,
        pinned_shape=shape_from_message(batch.pinned_shape) if has_shape else None,
        is_warming=batch.warming,
    )


def candidates_from_message(batch: pb.CandidateBatch, limits: TreeLimits) -> CandidateColumns:
    """Returns the candidates.

    Raises:
        InvalidArgument: columns do not fit together, a tree is malformed or beyond the limits, or a
            shape is out of range.
    """
    num_nodes = len(batch.token_ids)
    read = ColumnReader(batch, len(batch.sequence_ids), InvalidArgument.malformed_tree)
    if bool(batch.condition_bonus_token_ids) != bool(batch.condition_node_indices):
        raise InvalidArgument.malformed_tree(
            f"{len(batch.condition_bonus_token_ids)} bonus tokens of conditions, but "
            f"{len(batch.condition_node_indices)} nodes"
        )
    # NumPy arrays, to avoid a Python object per number.
    log_probs = np.array(batch.log_probs, np.float32)
    if len(log_probs) not in (0, num_nodes):
        raise InvalidArgument.malformed_tree(
            f"{num_nodes} token ids but {len(log_probs)} log probabilities"
        )
    columns = CandidateColumns(
        sequence_ids=read.required("sequence_ids"),
        rounds=read.required("rounds"),
        committed_token_counts=read.required("committed_token_counts"),
        candidate_ids=read.optional("candidate_ids", 0),
        bonus_token_ids=read.optional("condition_bonus_token_ids", -1),
        node_indices=read.optional("condition_node_indices", -1),
        conditioned_ids=read.optional("condition_candidate_ids", 0),
        shapes=read.shapes("shape_numbers", "shapes"),
        node_offsets=read.offsets("node_offsets", "token_ids", "parent_indices"),
        token_ids=np.array(batch.token_ids, np.int32),
        parent_indices=np.array(batch.parent_indices, np.int32),
        log_probs=log_probs if len(log_probs) else np.full(num_nodes, np.nan, np.float32),
    )
    if num_nodes:
        _check_trees(columns, limits)
        if len(log_probs) and not np.isfinite(log_probs).all():
            _check_log_probs(columns)
    return columns


def _check_trees(columns: CandidateColumns, limits: TreeLimits) -> None:
    offsets, parents = np.array(columns.node_offsets), np.asarray(columns.parent_indices)
    sizes = np.diff(offsets)
    largest = int(sizes.max())
    if largest > limits.max_nodes:
        raise InvalidArgument.malformed_tree(
            f"{largest} nodes; the target accepts {limits.max_nodes}"
        )
    nodes = np.arange(len(parents)) - np.repeat(offsets[:-1], sizes)
    for place in np.flatnonzero((parents < -1) | (parents >= nodes))[:1]:
        parent = int(parents[place])
        message = f"node {nodes[place]} has parent {parent}; a parent must come before its child"
        if parent < -1:
            message = f"parent index {parent} is below -1"
        raise InvalidArgument.malformed_tree(message)
    if largest > limits.max_depth:
        _check_depths(columns, sizes, limits.max_depth)
    tokens = np.asarray(columns.token_ids)
    for place in np.flatnonzero((tokens < 0) | (tokens >= limits.vocab_size))[:1]:
        raise InvalidArgument.malformed_tree(
            f"token {tokens[place]} is outside the vocabulary [0, {limits.vocab_size})"
        )


def _check_depths(columns: CandidateColumns, sizes: NDArray[np.int64], max_depth: int) -> None:
    for place in np.flatnonzero(sizes > max_depth).tolist():
        depth = max(columns.tree(place).depths)
        if depth > max_depth:
            raise InvalidArgument.malformed_tree(
                f"a node at depth {depth}; the model's sliding window leaves room for {max_depth}"
            )


def _check_log_probs(columns: CandidateColumns) -> None:
    """A tree has a finite log probability at each node, or NaN at each."""
    log_probs = np.asarray(columns.log_probs)
    is_absent, is_infinite = np.isnan(log_probs), np.isinf(log_probs)
    starts = np.array(columns.node_offsets)
    num_absent = np.concatenate(([0], np.cumsum(is_absent)))
    absent = num_absent[starts[1:]] - num_absent[starts[:-1]]
    if is_infinite.any() or ((absent > 0) & (absent < np.diff(starts))).any():
        raise InvalidArgument.malformed_tree("a log probability is not finite")


def add_verdicts(batch: pb.VerdictBatch, verdicts: Sequence[Verdict]) -> None:
    """Writes one step's verdicts into an empty message."""
    if not verdicts:
        return
    batch.sequence_ids.extend([verdict.sequence_id for verdict in verdicts])
    batch.rounds.extend([verdict.round for verdict in verdicts])
    batch.outcomes.extend([_OUTCOMES[verdict.outcome] for verdict in verdicts])
    batch.committed_token_counts.extend([verdict.committed_token_count for verdict in verdicts])
    committed = [verdict.committed_token_ids for verdict in verdicts]
    _add_ragged(batch.committed_offsets, batch.committed_token_ids, committed)
    accepted = [verdict.accepted_node_indices for verdict in verdicts]
    _add_ragged(batch.accepted_offsets, batch.accepted_node_indices, accepted)
    add_optional(batch.candidate_ids, [verdict.candidate_id or 0 for verdict in verdicts], 0)
    add_optional(
        batch.next_candidate_ids, [verdict.next_candidate_id or 0 for verdict in verdicts], 0
    )
    requests = [verdict.tree_request for verdict in verdicts]
    shapes = [request.shape for request in requests]
    add_shapes(shapes, batch.wanted_shape_numbers, batch.wanted_shapes)
    add_optional(batch.paused, [request.is_paused for request in requests], absent=False)
    counts = [-1 if request.num_outcomes is None else request.num_outcomes for request in requests]
    add_optional(batch.wanted_outcome_counts, counts, -1)


def verdicts_from_message(batch: pb.VerdictBatch) -> list[Verdict]:
    """Returns the verdicts.

    Raises:
        InvalidArgument: columns do not fit together, an outcome is unknown, no token was committed,
            or a wanted shape or number of outcomes is out of range.
    """
    read = ColumnReader(batch, len(batch.sequence_ids), malformed_verdicts)
    numbers: list[int] = read.required("outcomes")
    for number in numbers:
        if number not in _OUTCOME_OF:
            raise InvalidArgument.of("OUTCOME_UNKNOWN", "outcomes", f"an outcome is {number}")
    accepted = read.offsets("accepted_offsets", "accepted_node_indices")
    offsets = read.offsets("committed_offsets", "committed_token_ids")
    committed = _ragged(offsets, batch.committed_token_ids[:])
    if not all(committed):
        raise InvalidArgument.of(
            "VERDICT_EMPTY", "committed_offsets", "a verdict commits at least 1 token; one has 0"
        )
    return list(
        map(
            Verdict,
            read.required("sequence_ids"),
            read.required("rounds"),
            [_OUTCOME_OF[number] for number in numbers],
            _ragged(accepted, batch.accepted_node_indices[:]),
            committed,
            read.required("committed_token_counts"),
            _tree_requests(read),
            [number or None for number in read.optional("candidate_ids", 0)],
            [number or None for number in read.optional("next_candidate_ids", 0)],
        )
    )


def opening_tree_request(message: pb.SequenceOpened) -> TreeRequest:
    """Returns the target's request for the first tree of a sequence.

    Raises:
        InvalidArgument: the shape or the number of outcomes is out of range.
    """
    shape = shape_from_message(message.wanted_shape) if message.HasField("wanted_shape") else None
    num_outcomes = message.wanted_outcome_count if message.HasField("wanted_outcome_count") else -1
    if message.HasField("wanted_outcome_count") and num_outcomes < 0:
        raise InvalidArgument.out_of_range("wanted_outcome_count", num_outcomes, "at least 0")
    return _tree_request(shape, num_outcomes, is_paused=message.paused)


def malformed_verdicts(message: str) -> InvalidArgument:
    return InvalidArgument.of("VERDICTS_MALFORMED", "verdicts", f"malformed verdicts: {message}")


def _tree_requests(read: ColumnReader) -> list[TreeRequest]:
    shapes = read.shapes("wanted_shape_numbers", "wanted_shapes")
    paused = read.optional("paused", absent=False)
    counts = read.optional("wanted_outcome_counts", -1)
    if counts and min(counts) < -1:
        raise InvalidArgument.out_of_range("wanted_outcome_counts", min(counts), "at least -1")
    # Few requests differ, and a new object costs a microsecond.
    keys = list(zip(shapes, counts, paused, strict=True))
    requests = {key: _tree_request(key[0], key[1], is_paused=key[2]) for key in set(keys)}
    return [requests[key] for key in keys]


def _tree_request(shape: TreeShape | None, num_outcomes: int, *, is_paused: bool) -> TreeRequest:
    if is_paused:
        return NO_TREE
    if shape is None and num_outcomes < 0:
        return ANY_TREE
    return TreeRequest(shape, num_outcomes=None if num_outcomes < 0 else num_outcomes)


def _add_ragged(offsets: Any, values: Any, rows: Sequence[Sequence[int]]) -> None:
    offsets.extend(accumulate(map(len, rows), initial=0))
    values.extend([value for row in rows for value in row])


def _ragged(offsets: Sequence[int], values: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(values[start:end]) for start, end in pairwise(offsets)]
