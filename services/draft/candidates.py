"""Trees of a sequence as candidate messages. No torch."""

from __future__ import annotations

from services.draft.in_flight_tree import InFlightTree
from services.draft.sequence import DraftSequence
from shared.candidate_columns import UNCONDITIONAL, CandidateRow, condition_key
from shared.tokens import Condition, TokenTree, TreeShape


def current_row(sequence: DraftSequence, tree: TokenTree, shape: TreeShape | None) -> CandidateRow:
    """Returns the tree for the sequence's current round."""
    return *_fence(sequence), 0, *UNCONDITIONAL, shape, tree


def launched_row(sequence: DraftSequence, tree: TokenTree, shape: TreeShape | None) -> CandidateRow:
    """Returns the tree for the current round, with an id that conditions can name, and makes it the
    in-flight tree."""
    candidate_id = sequence.new_candidate_id()
    sequence.in_flight = InFlightTree(candidate_id, tree)
    return *_fence(sequence), candidate_id, *UNCONDITIONAL, shape, tree


def conditional_row(
    sequence: DraftSequence, tree: TokenTree, condition: Condition, shape: TreeShape | None
) -> CandidateRow | None:
    """Returns the tree for a verdict on the in-flight tree; None when it can be of no use.

    Args:
        condition: names no candidate yet.
    """
    is_known = condition.bonus_token_id < sequence.vocab_size
    if sequence.in_flight is None or not is_known or not tree.token_ids:
        return None
    candidate_id = sequence.new_candidate_id()
    key = sequence.in_flight.push(condition_key(condition), candidate_id, tree)
    return *_fence(sequence), candidate_id, *key, shape, tree


def _fence(sequence: DraftSequence) -> tuple[int, int, int]:
    return sequence.key.sequence_id, sequence.round, len(sequence.token_ids)


def drop_unknown_tokens(tree: TokenTree, vocab_size: int) -> TokenTree:
    """Returns the tree without tokens outside `[0, vocab_size)` and without their descendants.

    A draft's vocabulary may be padded further than its target's.
    """
    if not tree.token_ids or max(tree.token_ids) < vocab_size:
        return tree
    kept: dict[int | None, int | None] = {None: None}
    for node, parent in enumerate(tree.parent_indices):
        if parent in kept and tree.token_ids[node] < vocab_size:
            kept[node] = len(kept) - 1
    nodes = [node for node in kept if node is not None]
    return TokenTree(
        tuple(tree.token_ids[node] for node in nodes),
        tuple(kept[tree.parent_indices[node]] for node in nodes),
        tuple(tree.log_probs[node] for node in nodes) if tree.log_probs else (),
    )
