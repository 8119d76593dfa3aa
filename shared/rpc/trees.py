"""Trees and their shapes to and from protobuf, as in requests that are written by hand."""

from __future__ import annotations

import math

from shared.errors import InvalidArgument
from shared.pb.outrider.types.v1 import token_tree_pb2
from shared.tokens import TokenTree, TreeShape


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
    return token_tree_pb2.TokenTree(
        token_ids=tree.token_ids,
        parent_indices=[-1 if parent is None else parent for parent in tree.parent_indices],
        log_probs=tree.log_probs,
    )


def shape_from_message(message: token_tree_pb2.TreeShape) -> TreeShape:
    """Returns the shape; `TreeShape` refuses what is out of range."""
    return TreeShape(message.step_count, message.topk, message.draft_token_count)


def shape_message(shape: TreeShape) -> token_tree_pb2.TreeShape:
    """Returns the message."""
    return token_tree_pb2.TreeShape(
        step_count=shape.num_steps, topk=shape.topk, draft_token_count=shape.num_draft_tokens
    )
