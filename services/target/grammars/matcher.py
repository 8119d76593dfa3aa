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
    # A target without llguidance can still serve requests without grammars.
    from llguidance import LLExecutor, LLMatcher

_MAX_REASON_CHARACTERS = 500
_MAX_MASKS_S = 0.5  # usually less than a millisecond each
_NUM_THREADS = 4
_WORD_BITS = 32
Masks = NDArray[np.int32]
"""One row per tree row: bit i % 32 of word i // 32 says whether token i may come next."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar ready for use, shared by the outputs that must match it.

    Attributes:
        start: a matcher before the first token, which is copied.
        num_tokens: number of tokens of its tokenizer.
    """

    start: LLMatcher
    num_tokens: int

    def matcher(self) -> GrammarMatcher:
        """Returns a matcher before the first token."""
        return GrammarMatcher(self.start, -(-self.num_tokens // _WORD_BITS))


class GrammarMatcher:
    """Follows one output through its grammar. Owned by the engine thread.

    Attributes:
        failure: why the grammar cannot be followed further, for example because it exceeded a bound
            of the matcher; the output must end then. None while it can be followed.
        num_words: words of a mask; see `Masks`.
    """

    def __init__(self, start: LLMatcher, num_words: int) -> None:
        self.failure: InvalidArgument | None = None
        self.num_words = num_words
        self._start = start
        self._matcher = start.deep_copy()
        self._token_ids: list[int] = []

    @property
    def has_ended(self) -> bool:
        """Whether no token can follow: the grammar is complete, or cannot be followed further."""
        return self.failure is not None or self._matcher.is_stopped()

    def advance(self, token_id: int) -> None:
        """Takes a committed token, which a mask allowed."""
        self._token_ids.append(token_id)
        if not self._matcher.consume_token(token_id):
            self._fail(self._matcher.get_error())

    @property
    def inner(self) -> LLMatcher:
        """The matcher at the last committed token; the caller must leave it there."""
        return self._matcher

    def repair_masks(self, masks: Masks) -> None:
        """Repairs the masks of a path if the matcher met a bound. The last mask it wrote may be
        wrong, so it is cleared; the root's mask is computed again by a restored matcher."""
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

    def finish_tree(self, root: Masks) -> None:
        """Ends the computation of a tree's masks: restores a matcher in error, or fails the grammar
        if the mask of the root allows no token."""
        if root.any():
            if self._matcher.is_error():
                self._restore()
        elif self.failure is None:
            self._fail(self._matcher.get_error() or "no token can follow")

    def check_time(self) -> None:
        """Fails a grammar whose next mask takes too long."""
        begin_s = time.thread_time()
        self._matcher.compute_bitmask()
        elapsed_s = time.thread_time() - begin_s
        if elapsed_s > _MAX_MASKS_S:
            self._fail(f"a mask takes {elapsed_s:.2f} s; at most {_MAX_MASKS_S:g} s are allowed")

    def _restore(self) -> None:
        """Returns to the committed tokens with a new matcher; one in error cannot roll back."""
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._token_ids)

    def _fail(self, reason: str) -> None:
        message = (
            f"the grammar cannot be followed beyond {len(self._token_ids)} tokens: "
            f"{shown_reason(reason)}"
        )
        self.failure = InvalidArgument.of("GRAMMAR_TOO_COMPLEX", "grammar", message)


def shown_reason(error: str) -> str:
    """Returns the part of an llguidance error that clients should see; the rest is its state."""
    return error.split("\n<", 1)[0][:_MAX_REASON_CHARACTERS]


_MaskJob = tuple[GrammarMatcher, SequenceOf[int], TokenTree, Masks]
"""A matcher, the nodes of one path of its tree, the tree, and the array for the tree's masks."""


class MaskExecutor:
    """Computes masks of many matchers in parallel, without the GIL. Owned by the engine thread."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def tree_masks(
        self, matchers: SequenceOf[GrammarMatcher], trees: SequenceOf[TokenTree]
    ) -> list[Masks]:
        """Returns the masks of each tree: the root's row first, then the nodes' rows.

        A row of zeros must not draw: the grammar forbids its node or an ancestor, or the matcher
        met a bound there.
        """
        tree_masks = [
            np.zeros((1 + len(tree), matcher.num_words), np.int32)
            for matcher, tree in zip(matchers, trees, strict=True)
        ]
        tree_paths = [_paths(tree) for tree in trees]
        # One path of each tree at a time, because a matcher has only one position.
        for turn in range(max(map(len, tree_paths), default=0)):
            jobs = [
                (matchers[index], paths[turn], trees[index], tree_masks[index])
                for index, paths in enumerate(tree_paths)
                if turn < len(paths) and not matchers[index].inner.is_error()
            ]
            self._compute(jobs)
        for matcher, masks in zip(matchers, tree_masks, strict=True):
            matcher.finish_tree(masks[0])
        return tree_masks

    def _compute(self, jobs: SequenceOf[_MaskJob]) -> None:
        """Computes the masks on one path of each tree."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=_NUM_THREADS)
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        num_rows = 0
        for matcher, path, tree, _ in jobs:
            tokens = [tree.token_ids[node] for node in path]
            if tokens:
                drafted.append((matcher.inner, num_rows, tokens))
            else:
                plain.append((matcher.inner, num_rows))
            num_rows += 1 + len(tokens)
        num_words = jobs[0][0].num_words if jobs else 0
        rows = np.zeros((num_rows, num_words), np.int32)
        output = (rows.ctypes.data, rows.itemsize * num_words, num_rows)
        begin_s = time.monotonic()
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *output)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *output)
        if time.monotonic() - begin_s > _MAX_MASKS_S:
            for matcher, *_ in jobs:
                matcher.check_time()
        first = 0
        for matcher, path, _, masks in jobs:
            end = first + 1 + len(path)
            if matcher.failure is None:
                matcher.repair_masks(rows[first:end])
                masks[[0, *(node + 1 for node in path)]] = rows[first:end]
            first = end


def _paths(tree: TokenTree) -> list[list[int]]:
    """Returns the nodes below the root on the path to each leaf; [[]] for an empty tree."""
    leaves = set(range(len(tree))) - set(tree.parent_indices)
    return [list(tree.path(leaf)) for leaf in sorted(leaves)] or [[]]
