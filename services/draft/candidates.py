"""Trees of a sequence as its target is told of them. No torch."""

from __future__ import annotations

from dataclasses import replace

from services.draft.flight import Flight
from services.draft.sequence import DraftSequence
from shared.tokens import Candidate, Condition, TokenTree


def current_candidate(sequence: DraftSequence, tree: TokenTree) -> Candidate:
    """Returns the tree for the sequence's current round."""
    return Candidate(
        sequence_id=sequence.key.sequence_id,
        round=sequence.round,
        committed_token_count=sequence.num_tokens,
        tree=tree,
    )


def launched_candidate(sequence: DraftSequence, tree: TokenTree) -> Candidate:
    """Returns the tree for the current round, with an id that conditions can name, and makes it
    the sequence's flight."""
    sequence.flight = Flight(sequence.new_candidate_id(), tree)
    return replace(current_candidate(sequence, tree), candidate_id=sequence.flight.candidate_id)


def conditional_candidate(
    sequence: DraftSequence, tree: TokenTree, condition: Condition
) -> Candidate | None:
    """Returns the tree for a verdict on the sequence's flight; None when it can be of no use.

    Args:
        condition: names no candidate yet.
    """
    is_known = condition.bonus_token_id < sequence.vocab_size
    if sequence.flight is None or not is_known or not tree.token_ids:
        return None
    candidate_id = sequence.new_candidate_id()
    named = sequence.flight.push(condition, candidate_id, tree)
    candidate = current_candidate(sequence, tree)
    return replace(candidate, condition=named, candidate_id=candidate_id)


def drop_unknown_tokens(tree: TokenTree, vocab_size: int) -> TokenTree:
    """Returns the tree without tokens outside `[0, vocab_size)` and without their descendants.

    A draft's vocabulary may be padded further than its target's.
    """
    if all(token < vocab_size for token in tree.token_ids):
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
