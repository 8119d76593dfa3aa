"""The position of one output in its grammar. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidArgument
from shared.tokens import TokenTree

if TYPE_CHECKING:
    # A target decodes where it is not installed.
    from llguidance import LLExecutor, LLMatcher

_MAX_REASON_CHARACTERS = 500
_MAX_MASKS_S = 0.5  # usually less than a millisecond each
_NUM_THREADS = 4
_WORD_BITS = 32
Masks = NDArray[np.int32]
"""A row each: bit i % 32 of word i // 32 says whether token i may come next."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar ready for use, shared by the outputs that must match it.

    Attributes:
        num_tokens: that its tokenizer has.
    """

    start: LLMatcher
    num_tokens: int

    def matcher(self) -> GrammarMatcher:
        """Returns a matcher before the first token."""
        return GrammarMatcher(self.start, -(-self.num_tokens // _WORD_BITS))


class GrammarMatcher:
    """Follows one output through its grammar. Owned by the engine thread.

    Attributes:
        failure: why the grammar cannot be followed further: it exceeded a bound of the matcher.
            The output must end.
        num_words: of a mask, see `Masks`.
    """

    def __init__(self, start: LLMatcher, num_words: int) -> None:
        self.failure: InvalidArgument | None = None
        self.num_words = num_words
        self._start = start
        self._matcher = start.deep_copy()
        self._token_ids: list[int] = []

    @property
    def has_ended(self) -> bool:
        """Whether nothing can follow: the grammar is complete, or cannot be followed."""
        return self.failure is not None or self._matcher.is_stopped()

    def advance(self, token_id: int) -> None:
        """Takes a committed token, which a mask allowed."""
        self._token_ids.append(token_id)
        if not self._matcher.consume_token(token_id):
            self._fail(self._matcher.get_error())

    @property
    def inner(self) -> LLMatcher:
        """Stands at the last committed token; to be left there."""
        return self._matcher

    def check_bounds(self, masks: Masks) -> None:
        """Mends the masks of a path where the matcher met a bound: the last one that it wrote is
        not to be relied on, and it cannot go back by itself."""
        if not self._matcher.is_error():
            return
        written = np.flatnonzero(masks.any(axis=1))
        last = int(written[-1]) if len(written) else 0
        masks[last] = 0
        if last == 0:
            self._restore()
            root = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                masks[0] = np.frombuffer(root, np.int32, self.num_words)

    def computed(self, root: Masks) -> None:
        """The masks of a tree were computed, that of its root among them."""
        if root.any():
            if self._matcher.is_error():
                self._restore()
        elif self.failure is None:
            self._fail(self._matcher.get_error() or "no token can follow")

    def check_time(self) -> None:
        """Ends a grammar whose next mask takes too long."""
        begin_s = time.thread_time()
        self._matcher.compute_bitmask()
        taken_s = time.thread_time() - begin_s
        if taken_s > _MAX_MASKS_S:
            self._fail(f"a mask takes {taken_s:.2f} s; at most {_MAX_MASKS_S:g} s are allowed")

    def _restore(self) -> None:
        """Brings the matcher back to the committed tokens; one in error cannot roll back."""
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._token_ids)

    def _fail(self, reason: str) -> None:
        message = (
            f"the grammar cannot be followed beyond {len(self._token_ids)} tokens: "
            f"{shown_reason(reason)}"
        )
        self.failure = InvalidArgument.of("GRAMMAR_TOO_COMPLEX", "grammar", message)


def shown_reason(error: str) -> str:
    """Returns what a client should see of an error of llguidance; the rest is its inner state."""
    return error.split("\n<", 1)[0][:_MAX_REASON_CHARACTERS]


_Asked = tuple[GrammarMatcher, SequenceOf[int], TokenTree, Masks]
"""A matcher, the nodes of a path of its tree, the tree, and where the masks of its rows go."""


class MaskExecutor:
    """Computes masks of many matchers side by side. Owned by the engine thread, which lets go of
    the interpreter meanwhile."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def tree_masks(
        self, matchers: SequenceOf[GrammarMatcher], trees: SequenceOf[TokenTree]
    ) -> list[Masks]:
        """Returns the masks of the root's row, then of each node's, of each tree.

        A row of zeros must not draw: the grammar forbids its node or an ancestor, or the matcher
        met a bound there.
        """
        found = [
            np.zeros((1 + len(tree), matcher.num_words), np.int32)
            for matcher, tree in zip(matchers, trees, strict=True)
        ]
        paths = [_paths(tree) for tree in trees]
        # A path of each tree at a time, because a matcher can stand in one place only.
        for turn in range(max(map(len, paths), default=0)):
            asked = [
                (matchers[place], own[turn], trees[place], found[place])
                for place, own in enumerate(paths)
                if turn < len(own) and not matchers[place].inner.is_error()
            ]
            self._compute(asked)
        for matcher, masks in zip(matchers, found, strict=True):
            matcher.computed(masks[0])
        return found

    def _compute(self, asked: SequenceOf[_Asked]) -> None:
        """Computes the masks on one path of each tree."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=_NUM_THREADS)
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        num_rows = 0
        for matcher, path, tree, _ in asked:
            tokens = [tree.token_ids[node] for node in path]
            if tokens:
                drafted.append((matcher.inner, num_rows, tokens))
            else:
                plain.append((matcher.inner, num_rows))
            num_rows += 1 + len(tokens)
        num_words = asked[0][0].num_words if asked else 0
        rows = np.zeros((num_rows, num_words), np.int32)
        where = (rows.ctypes.data, rows.itemsize * num_words, num_rows)
        begin_s = time.monotonic()
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        if time.monotonic() - begin_s > _MAX_MASKS_S:
            for matcher, *_ in asked:
                matcher.check_time()
        first = 0
        for matcher, path, _, masks in asked:
            end = first + 1 + len(path)
            if matcher.failure is None:
                matcher.check_bounds(rows[first:end])
                masks[[0, *(node + 1 for node in path)]] = rows[first:end]
            first = end


def _paths(tree: TokenTree) -> list[list[int]]:
    """Returns the nodes from below the root to each leaf; one path without nodes of an empty
    tree."""
    leaves = set(range(len(tree))) - set(tree.parent_indices)
    return [list(tree.path(leaf)) for leaf in sorted(leaves)] or [[]]
