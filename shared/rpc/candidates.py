"""Candidates to and from protobuf, in columns. On the hot path: once a step, batched."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.candidate_columns import CandidateColumns
from shared.errors import InvalidArgument
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.columns import ColumnReader, add_optional, add_shapes
from shared.rpc.trees import shape_from_message, shape_message
from shared.tokens import DraftReport


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """A target's limits on trees.

    Attributes:
        max_nodes: of a tree.
        vocab_size: tokens are below it.
        max_depth: of a node, as far as a sliding window of the model reaches.
    """

    max_nodes: int
    vocab_size: int
    max_depth: int


def add_candidates(
    batch: pb.CandidateBatch, columns: CandidateColumns, report: DraftReport
) -> None:
    """Puts one step's candidates into an empty message."""
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
    """Returns what a batch says beside its candidates.

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
    log_probs = read.array("log_probs", np.float32)
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
        token_ids=read.array("token_ids", np.int32),
        parent_indices=read.array("parent_indices", np.int32),
        log_probs=log_probs if len(log_probs) else np.full(num_nodes, np.nan, np.float32),
    )
    if num_nodes:
        _check_trees(columns, limits)
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
    for place in _first((parents < -1) | (parents >= nodes)):
        parent = int(parents[place])
        message = f"node {nodes[place]} has parent {parent}; a parent must come before its child"
        if parent < -1:
            message = f"parent index {parent} is below -1"
        raise InvalidArgument.malformed_tree(message)
    if largest > limits.max_depth:
        _check_depths(columns, sizes, limits.max_depth)
    tokens = np.asarray(columns.token_ids)
    for place in _first((tokens < 0) | (tokens >= limits.vocab_size)):
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
    if len(log_probs) != len(columns.token_ids):
        raise InvalidArgument.malformed_tree(
            f"{len(columns.token_ids)} token ids but {len(log_probs)} log probabilities"
        )
    if np.isfinite(log_probs).all():
        return
    is_absent, is_infinite = np.isnan(log_probs), np.isinf(log_probs)
    starts = np.array(columns.node_offsets)
    num_absent = np.concatenate(([0], np.cumsum(is_absent)))
    absent = num_absent[starts[1:]] - num_absent[starts[:-1]]
    if is_infinite.any() or ((absent > 0) & (absent < np.diff(starts))).any():
        raise InvalidArgument.malformed_tree("a log probability is not finite")


def _first(is_wrong: NDArray[np.bool_]) -> list[int]:
    """Returns the first place that is wrong, if one is."""
    place = int(is_wrong.argmax())
    return [place] if is_wrong[place] else []
