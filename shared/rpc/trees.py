"""Trees, candidates and verdicts to and from protobuf. On the hot path: once a step, batched."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from shared.errors import InvalidArgument
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.types.v1 import token_tree_pb2
from shared.tokens import (
    ANY_TREE,
    NO_TREE,
    Candidate,
    Condition,
    DraftReport,
    Outcome,
    TokenTree,
    TreeShape,
    TreeWish,
    Verdict,
)

_OUTCOMES = {
    Outcome.VERIFIED: pb.Verdict.OUTCOME_VERIFIED,
    Outcome.MISSED: pb.Verdict.OUTCOME_MISSED,
    Outcome.STALE: pb.Verdict.OUTCOME_STALE,
    Outcome.VERIFIED_NEXT_READY: pb.Verdict.OUTCOME_VERIFIED_NEXT_READY,
}
_OUTCOME_OF = {number: outcome for outcome, number in _OUTCOMES.items()}


def tree_from_message(message: token_tree_pb2.TokenTree) -> TokenTree:
    """Returns the tree.

    Raises:
        InvalidArgument: it is malformed, or a log probability is not a finite number.
    """
    # A slice copies a repeated field in one call; iterating it costs a call an element.
    parents, log_probs = message.parent_indices[:], message.log_probs[:]
    if parents and min(parents) < -1:
        raise InvalidArgument.malformed_tree(f"parent index {min(parents)} is below -1")
    if not math.isfinite(sum(log_probs)):
        raise InvalidArgument.malformed_tree("a log probability is not finite")
    return TokenTree(
        tuple(message.token_ids[:]),
        tuple([None if parent == -1 else parent for parent in parents]),
        tuple(log_probs),
    )


def tree_message(tree: TokenTree) -> token_tree_pb2.TokenTree:
    """Returns the message."""
    return token_tree_pb2.TokenTree(**_tree_fields(tree))


def shape_from_message(message: token_tree_pb2.TreeShape) -> TreeShape:
    """Returns the shape; `TreeShape` refuses what is out of range."""
    return TreeShape(message.step_count, message.topk, message.draft_token_count)


def shape_message(shape: TreeShape) -> token_tree_pb2.TreeShape:
    """Returns the message."""
    return token_tree_pb2.TreeShape(**_shape_fields(shape))


def candidate_from_message(message: pb.Candidate) -> Candidate:
    """Returns the candidate.

    Raises:
        InvalidArgument: the tree is malformed, or its shape is out of range.
    """
    return Candidate(
        message.sequence_id,
        message.round,
        message.committed_token_count,
        tree_from_message(message.tree),
        _condition(message.condition) if message.HasField("condition") else None,
        message.candidate_id if message.HasField("candidate_id") else None,
        shape_from_message(message.shape) if message.HasField("shape") else None,
    )


def add_candidates(
    batch: pb.CandidateBatch, candidates: Iterable[Candidate], report: DraftReport
) -> None:
    """Puts one step's candidates into an empty message, where it is: copies of messages cost more
    than their fields."""
    for each in candidates:
        batch.candidates.add(
            sequence_id=each.sequence_id,
            round=each.round,
            committed_token_count=each.committed_token_count,
            tree=_tree_fields(each.tree),
            # None leaves a field absent.
            condition=None if each.condition is None else _condition_fields(each.condition),
            candidate_id=each.candidate_id,
            shape=None if each.shape is None else _shape_fields(each.shape),
        )
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


def wish_from_message(message: pb.Verdict | pb.SequenceOpened) -> TreeWish:
    """Returns what the target wants of the next tree.

    Raises:
        InvalidArgument: the shape or the number of outcomes is out of range.
    """
    if message.paused:
        return NO_TREE
    shape = shape_from_message(message.wanted_shape) if message.HasField("wanted_shape") else None
    if not message.HasField("wanted_outcome_count"):
        return ANY_TREE if shape is None else TreeWish(shape)
    num_outcomes = message.wanted_outcome_count
    if num_outcomes < 0:
        raise InvalidArgument.out_of_range("wanted_outcome_count", num_outcomes, "at least 0")
    return TreeWish(shape, num_outcomes=num_outcomes)


def wanted_shape_message(wish: TreeWish) -> token_tree_pb2.TreeShape | None:
    """Returns the message of the shape that is wanted, if one is."""
    return None if wish.shape is None else shape_message(wish.shape)


def verdict_from_message(message: pb.Verdict) -> Verdict:
    """Returns the verdict.

    Raises:
        InvalidArgument: the outcome is unknown or no token was committed.
    """
    outcome = _OUTCOME_OF.get(message.outcome)
    if outcome is None:
        raise InvalidArgument.of("OUTCOME_UNKNOWN", "outcome", f"outcome is {message.outcome}")
    if not message.committed_token_ids:
        raise InvalidArgument.of(
            "VERDICT_EMPTY", "committed_token_ids", "a verdict commits at least 1 token; it has 0"
        )
    return Verdict(
        message.sequence_id,
        message.round,
        outcome,
        tuple(message.accepted_node_indices[:]),
        tuple(message.committed_token_ids[:]),
        message.committed_token_count,
        wish_from_message(message),
        message.candidate_id if message.HasField("candidate_id") else None,
        message.next_candidate_id if message.HasField("next_candidate_id") else None,
    )


def add_verdicts(batch: pb.VerdictBatch, verdicts: Iterable[Verdict]) -> None:
    """Puts one step's verdicts into an empty message, where it is."""
    for each in verdicts:
        wish = each.wish
        batch.verdicts.add(
            sequence_id=each.sequence_id,
            round=each.round,
            outcome=_OUTCOMES[each.outcome],
            accepted_node_indices=each.accepted_node_indices,
            committed_token_ids=each.committed_token_ids,
            committed_token_count=each.committed_token_count,
            wanted_shape=None if wish.shape is None else _shape_fields(wish.shape),
            paused=wish.is_paused,
            wanted_outcome_count=wish.num_outcomes,
            candidate_id=each.candidate_id,
            next_candidate_id=each.next_candidate_id,
        )


def _condition(message: pb.Condition) -> Condition:
    return Condition(
        message.node_index if message.HasField("node_index") else None,
        message.bonus_token_id,
        message.candidate_id if message.HasField("candidate_id") else None,
    )


def _tree_fields(tree: TokenTree) -> dict[str, Any]:
    return {
        "token_ids": tree.token_ids,
        "parent_indices": [-1 if parent is None else parent for parent in tree.parent_indices],
        "log_probs": tree.log_probs,
    }


def _shape_fields(shape: TreeShape) -> dict[str, int]:
    return {
        "step_count": shape.num_steps,
        "topk": shape.topk,
        "draft_token_count": shape.num_draft_tokens,
    }


def _condition_fields(condition: Condition) -> dict[str, int | None]:
    return {
        "node_index": condition.node_index,
        "bonus_token_id": condition.bonus_token_id,
        "candidate_id": condition.candidate_id,
    }
