"""The target's own trees, for rounds without a draft's tree: continuations of the same tokens in
any earlier prompt or output. A look-up on the host; no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.target.sequence import Sequence
from services.target.step_plan import narrowed
from shared.ngram import Cursor, NgramIndex, NgramOptions
from shared.tokens import EMPTY_TREE, TokenTree, TreeShape

OPTIONS = NgramOptions(max_trie_depth=8, capacity=1_000_000, min_match=2)
"""Shorter matches are mostly wrong, and a wrong tree costs rows."""
SHAPE = TreeShape(num_steps=7, topk=2, num_draft_tokens=9)
MAX_TOKENS_AT_ONCE = 4096
"""Most prompt tokens indexed in one step, on the engine thread: under a microsecond each."""


class Fallback(enum.Enum):
    """Source of trees for rounds without a draft's tree."""

    NONE = "none"
    NGRAM = "ngram"


@dataclass(slots=True)
class _SequenceState:
    """The position of a sequence in the index, and its tree at that position."""

    cursor: Cursor
    num_tokens: int = 0
    tree: TokenTree = EMPTY_TREE


class NgramFallback:
    """Trees from the n-grams of every sequence of this target. Owned by the engine thread."""

    def __init__(self) -> None:
        self._index = NgramIndex(OPTIONS)
        self._states: dict[int, _SequenceState] = {}

    def tree(self, sequence: Sequence) -> TokenTree:
        """Returns the tree for the sequence's current round, perhaps empty."""
        state = self._states.get(sequence.sequence_id)
        if state is None:
            cursor = Cursor.of(sequence.request.cache_salt)
            state = self._states[sequence.sequence_id] = _SequenceState(cursor)
        if state.num_tokens != len(sequence.token_ids):
            state.tree = self._grow(state, sequence)
        return state.tree

    def forget(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended; its n-grams stay in the index."""
        self._states.pop(sequence.sequence_id, None)

    def _grow(self, state: _SequenceState, sequence: Sequence) -> TokenTree:
        cursor, token_ids = state.cursor, sequence.token_ids
        if len(token_ids) - cursor.num_seen > MAX_TOKENS_AT_ONCE:
            self._index.take_in([(cursor, token_ids[: cursor.num_seen + MAX_TOKENS_AT_ONCE])])
            return EMPTY_TREE
        state.num_tokens = len(token_ids)
        [tree] = self._index.grow([(cursor, token_ids)], SHAPE)
        return tree


def own_tree(sequence: Sequence, fallback: NgramFallback | None) -> TokenTree:
    """Returns the target's own tree for a round without a draft's tree: from the request's
    prediction, else from n-grams. It is cut to the request's `num_draft_tokens`; perhaps empty."""
    if sequence.request.speculation_disabled:
        return EMPTY_TREE
    tree = EMPTY_TREE if sequence.prediction is None else sequence.prediction.tree()
    if fallback is not None and not tree.token_ids:
        tree = fallback.tree(sequence)
    return narrowed(tree, sequence.request.num_draft_tokens)[0]
