"""Trees of the target's own, for rounds that no draft has one for: what followed the same words
before in any prompt or output. A look-up on the host; no torch."""

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
"""Tokens of a long prompt taken in a step, on the engine's thread: a fraction of a microsecond
each."""


class Fallback(enum.Enum):
    """Source of trees for sequences without a draft's tree."""

    NONE = "none"
    NGRAM = "ngram"


@dataclass(slots=True)
class _Text:
    """The position of a sequence in the index, and its tree at that position."""

    cursor: Cursor
    num_tokens: int = 0
    tree: TokenTree = EMPTY_TREE


class NgramFallback:
    """N-grams of every sequence of this target. Owned by the engine thread."""

    def __init__(self) -> None:
        self._index = NgramIndex(OPTIONS)
        self._texts: dict[int, _Text] = {}

    def tree(self, sequence: Sequence) -> TokenTree:
        """Returns the tree for the sequence's current round, perhaps empty."""
        text = self._texts.get(sequence.sequence_id)
        if text is None:
            cursor = Cursor.of(sequence.request.cache_salt)
            text = self._texts[sequence.sequence_id] = _Text(cursor)
        if text.num_tokens != len(sequence.token_ids):
            text.tree = self._grow(text, sequence)
        return text.tree

    def forget(self, sequence: Sequence) -> None:
        """Lets go of a sequence that has ended; its n-grams stay."""
        self._texts.pop(sequence.sequence_id, None)

    def _grow(self, text: _Text, sequence: Sequence) -> TokenTree:
        cursor, token_ids = text.cursor, sequence.token_ids
        if len(token_ids) - cursor.num_seen > MAX_TOKENS_AT_ONCE:
            self._index.take_in([(cursor, token_ids[: cursor.num_seen + MAX_TOKENS_AT_ONCE])])
            return EMPTY_TREE
        text.num_tokens = len(token_ids)
        [tree] = self._index.grow([(cursor, token_ids)], SHAPE)
        return tree


def own_tree(sequence: Sequence, fallback: NgramFallback | None) -> TokenTree:
    """Returns the target's tree for a round without a draft's: of the request's prediction, or of
    n-grams. Cut to what the request allows, perhaps empty."""
    if sequence.request.speculation_disabled:
        return EMPTY_TREE
    tree = EMPTY_TREE if sequence.prediction is None else sequence.prediction.tree()
    if fallback is not None and not tree.token_ids:
        tree = fallback.tree(sequence)
    return narrowed(tree, sequence.request.num_draft_tokens)[0]
